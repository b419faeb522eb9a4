"""verl's replay buffer, extended by metrics of what was left out, a limit on the age of rollouts, and stable steps.

    trainer.v1.sampler.custom_sampler.path=pkg://rollout_backend.verl.sampler
    trainer.v1.sampler.custom_sampler.name=RolloutSampler
    +trainer.v1.sampler.sampler_kwargs.max_staleness=2      # only with separate_async and colocate_async
    +trainer.v1.sampler.sampler_kwargs.stable_steps=False
    +trainer.v1.sampler.sampler_kwargs.weigh_rollouts=True

The sampler wraps verl's own buffer and keeps all of its settings (off-policy drop or wait, group filtering, refill of
failed groups). The v1 trainer logs the metrics that a sampler returns with a batch; `rollout_backend.verl.metrics`
lists ours.

`max_staleness` counts weight versions. The trainer waits for groups that would become older than that: it takes a
batch only if each unfinished group still has a place in a later batch within the limit (`core.staleness`). So no
group is dropped for its age, and long rollouts are trained as often as short ones. verl itself drops old groups
(`max_off_policy_strategy=drop`), or waits only for groups that have reached the limit (`wait`): if more of them
remain than the next batch has places, the others exceed it.

After a restart of the trainer, a rollout can still be too old by the versions that sampled its trained tokens. It is
then dropped. If fewer than two rollouts of a group remain, the whole group is dropped, because a single rollout has
no baseline. A group of another prompt replaces each dropped group.

Rows are ordered by verl's prompts, then by rollout and segment, not by arrival: sums of floating-point numbers depend
on the order, so equal rollouts would otherwise give different gradients.

With `stable_steps`, the default, the number of optimizer steps does not depend on how many rows a batch has: see
`StableSteps`.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transfer_queue as tq
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transfer_queue import KVBatchMeta

from rollout_backend.core.staleness import groups_to_await, staleness
from rollout_backend.errors import ConfigError
from rollout_backend.verl import early_checks
from rollout_backend.verl.metrics import TALLY, TOO_OLD, as_metrics
from rollout_backend.verl.trainer_sizes import mini_batch_unit
from rollout_backend.verl.verl_api import (
    ReplayBuffer,
    ReplayBufferAsync,
    list_of_dict_to_tensordict,
    need_critic,
    root_of,
    upsample_batch_to_divisible_size,
)

log = logging.getLogger(__name__)

_KEY = "trainer.v1.sampler.sampler_kwargs"
# Validation batches without a row have this data source.
NO_RESULT = "no_result"
# verl's default of 2 s would delay a finished batch by 1 s on average.
_POLL_S = 0.25


class SamplerOptions(BaseModel):
    """`trainer.v1.sampler.sampler_kwargs`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_staleness: int | None = Field(default=None, ge=0)
    """How many versions older than the weights being trained a token may be. Default: no limit.

    The trainer waits for rollouts that would become older, instead of dropping them."""
    stable_steps: bool = True
    """Whether the size of mini-batches follows the number of rows, so that the number of optimizer steps does not."""
    weigh_rollouts: bool = False
    """Whether each rollout weighs the same in the loss, instead of each row or token (`actor.loss_agg_mode`). The
    estimators of `rollout_backend.verl.advantage` multiply their advantages by the weights."""


class RolloutSampler:
    """Gives verl's v1 trainer its batches. verl makes it instead of its own buffer."""

    def __init__(
        self,
        trainer_mode: str,
        sampler_kwargs: Mapping[str, Any],
        refill_fn: Callable[[int], Any],
        **verl_arguments: Any,
    ) -> None:
        """verl makes the sampler before it starts an engine.

        Raises:
            ConfigError, PreflightError: a setting is wrong, or the run cannot start.
        """
        options = _options(sampler_kwargs, trainer_mode)
        early_checks.check(sampler_kwargs)
        self._max_staleness = options.max_staleness
        if options.max_staleness is not None:
            _check_pace(options.max_staleness, trainer_mode, verl_arguments)
        self._batches_per_step = int(verl_arguments["trainer_config"].get("parameter_sync_step", 1))
        # Batches by step, and the counts of the current step's batches.
        self._taken: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        root = root_of(sampler_kwargs)
        self._stable_steps = StableSteps(root) if options.stable_steps and "actor_rollout_ref" in root else None
        self._refill = refill_fn
        make = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
        self._buffer = make(
            trainer_mode=trainer_mode,
            sampler_kwargs={},
            refill_fn=refill_fn,
            poll_interval=_POLL_S,
            **verl_arguments,
            **_withheld_settings(sampler_kwargs, trainer_mode),
        )

    @property
    def poll_interval(self) -> float:
        return float(self._buffer.poll_interval)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Wait for a batch of `batch_size` prompts and remove it. Step `global_steps` trains version
        `global_steps` - 1."""
        if partition_id != "train":
            batch, metrics = self._take(global_steps, partition_id, batch_size)
            return batch if batch.keys else _unknown_result(partition_id), metrics
        self._taken[global_steps] += 1
        left_in_step = self._batches_per_step - self._taken[global_steps]
        if self._max_staleness is not None:
            self._await_old_groups(global_steps, batch_size, left_in_step, self._max_staleness)
        batch, metrics = self._take(global_steps, partition_id, batch_size)
        too_old: Counter[str] = Counter()
        if self._max_staleness is not None:
            batch, metrics, too_old = self._drop_stale(batch, metrics, global_steps)
        batch.reorder(sorted(range(len(batch)), key=lambda i: _place(batch.keys[i], batch.tags[i])))
        parts = [(tag["trained_tokens"], tag["mean_version"], tag["min_global_steps"]) for tag in batch.tags]
        metrics |= staleness(parts, global_steps - 1)
        trained = {
            "trained": len({_session(key) for key in batch.keys}),
            "trained_tokens": sum(n for n, _, _ in parts),
        }
        for counts in (TALLY.take(partition_id), too_old, trained):
            self._counts.update(counts)
        if left_in_step <= 0:
            # Only the last batch reports the counts: verl takes the minimum of a metric with "min" in its name, such
            # as `terminated`.
            metrics |= as_metrics(self._counts, self._counts["trained"])
            self._counts.clear()
        return batch if self._stable_steps is None else self._stable_steps.apply(batch, batch_size), metrics

    def wait_for_sampleable(self, *args: Any, **kwargs: Any) -> Any:
        return self._buffer.wait_for_sampleable(*args, **kwargs)

    def get_sampleable_count(self, *args: Any, **kwargs: Any) -> Any:
        return self._buffer.get_sampleable_count(*args, **kwargs)

    def _await_old_groups(self, step: int, batch_size: int, left_in_step: int, max_staleness: int) -> None:
        """Wait until each group that is left unfinished can be trained later within the age limit."""
        size = self._batches_per_step * batch_size
        logged = False
        while count := groups_to_await(_unfinished(), step, max_staleness, size, left_in_step * batch_size):
            if not logged:
                log.info("step %d waits for %d groups that would be too old in a later step", step, count)
                logged = True
            time.sleep(_POLL_S)

    def _take(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        batch, metrics = self._buffer.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        return batch, dict(metrics)

    def _drop_stale(
        self, batch: KVBatchMeta, metrics: dict[str, Any], global_steps: int
    ) -> tuple[KVBatchMeta, dict[str, Any], Counter[str]]:
        assert self._max_staleness is not None
        oldest = global_steps - 1 - self._max_staleness
        kept: dict[str, dict[str, Any]] = {}
        counts: Counter[str] = Counter()
        while True:
            fresh, groups = _split_stale(batch, oldest, counts)
            dropped = [key for key in batch.keys if key not in fresh]
            if dropped:
                tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
            kept |= fresh
            if not groups:
                return (
                    KVBatchMeta(partition_id=batch.partition_id, keys=[*kept], tags=[*kept.values()]),
                    metrics,
                    counts,
                )
            self._refill(groups)
            batch, more = self._take(global_steps, batch.partition_id, groups)
            metrics = _merged(metrics, more)


def _unknown_result(partition_id: str) -> KVBatchMeta:
    """Write a row with an unknown reward for a validation batch that lost each rollout, and return it as the batch.

    verl ends the training if a validation batch has no row. The row has its own data source, so it is in no mean.
    """
    log.warning("a validation batch has no result: each of its rollouts is lost. verl logs it as %s", NO_RESULT)
    key = f"lost{uuid.uuid4().hex}_0_0"
    token = torch.zeros(1, dtype=torch.int64)
    fields = {"prompts": token, "responses": token, "rm_scores": torch.full((1,), math.nan), "num_turns": 0}
    fields |= {"uid": _group(key), "data_source": NO_RESULT, "extra_fields": {}}
    tags = [{"status": "success"}]
    tq.kv_batch_put(keys=[key], partition_id=partition_id, fields=list_of_dict_to_tensordict([fields]), tags=tags)
    return KVBatchMeta(partition_id=partition_id, keys=[key], tags=tags)


def _unfinished() -> list[int]:
    """Return the step in which each unfinished group was requested."""
    tags = (tq.kv_list("train") or {}).get("train", {}).values()
    return [tag["global_steps"] for tag in tags if tag.get("is_prompt") and tag["status"] in ("pending", "running")]


def _split_stale(batch: KVBatchMeta, oldest: int, counts: Counter[str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the rows that may be trained and the number of groups that are dropped whole."""
    old = {_session(key) for key, tag in zip(batch.keys, batch.tags, strict=True) if tag["min_global_steps"] < oldest}
    sessions: dict[str, set[str]] = defaultdict(set)
    for key in batch.keys:
        sessions[_group(key)].add(_session(key))
    dropped = {group for group, all_of_it in sessions.items() if all_of_it & old and len(all_of_it - old) < 2}
    out = old | {session for group in dropped for session in sessions[group]}
    counts[f"left_out/{TOO_OLD}"] += len(out)
    counts["groups_dropped"] += len(dropped)
    rows = dict(zip(batch.keys, batch.tags, strict=True))
    counts["too_old_tokens"] += sum(tag["trained_tokens"] for key, tag in rows.items() if _session(key) in out)
    return {key: tag for key, tag in rows.items() if _session(key) not in out}, len(dropped)


def _place(key: str, tag: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the key by which rows are sorted: batch, prompt, session and segment."""
    _, session, index = key.rsplit("_", 2)
    return tag.get("batch", 0), tag.get("place", 0), int(session), int(index)


def _session(key: str) -> str:
    return key.rpartition("_")[0]


def _group(key: str) -> str:
    return key.partition("_")[0]


def _merged(metrics: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the metrics of a second batch for the same step. verl's counts are added up."""
    both = {**metrics, **more}
    for key in metrics.keys() & more.keys():
        if key.endswith("evicted_samples"):
            both[key] = metrics[key] + more[key]
    return both


def _options(given: Mapping[str, Any], trainer_mode: str) -> SamplerOptions:
    try:
        options = SamplerOptions.model_validate({str(key): value for key, value in given.items()})
    except ValidationError as error:
        lines = [f"{_KEY}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None
    if options.max_staleness is not None and trainer_mode == "sync":
        raise ConfigError(
            f"{_KEY}.max_staleness: with trainer.v1.trainer_mode=sync nothing is older than the weights being "
            "trained; remove it, or choose separate_async"
        )
    return options


def _check_pace(max_staleness: int, trainer_mode: str, verl_arguments: Mapping[str, Any]) -> None:
    """Refuse settings of verl with which groups would be too old, or dropped, however fast they are."""
    ahead = verl_arguments["trainer_config"].get("num_warmup_batches", 0)
    if ahead > max_staleness:
        raise ConfigError(
            f"trainer.v1.{trainer_mode}.num_warmup_batches={ahead}: verl requests that many batches ahead, so "
            f"rollouts are that many versions old when they are trained, and {_KEY}.max_staleness={max_staleness} "
            "allows less: make one of them fit the other"
        )
    threshold = verl_arguments["max_off_policy_threshold"]
    if verl_arguments["max_off_policy_strategy"] == "drop" and threshold is not None and threshold <= max_staleness:
        raise ConfigError(
            f"trainer.v1.sampler.max_off_policy_threshold={threshold}: verl would drop rollouts that are {threshold} "
            f"versions old, and {_KEY}.max_staleness={max_staleness} admits them: set it to null"
        )


def _withheld_settings(section: Any, trainer_mode: str) -> dict[str, Any]:
    """Return the buffer settings that verl passes to its own buffer but not to a custom sampler."""
    root = root_of(section)
    if "trainer" not in root:
        return {}
    refill = bool(root["trainer"]["v1"]["sampler"].get("sync_refill_failed_groups", False))
    groups = root["algorithm"].get("filter_groups") or {}
    metric = groups.get("metric") if groups.get("enable", False) else None
    if groups.get("enable", False) and not metric:
        raise ConfigError(
            "algorithm.filter_groups.metric is missing: set it, or algorithm.filter_groups.enable=False"
        )
    settings: dict[str, Any] = {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
    if trainer_mode == "sync":
        size = int(root["data"]["train_batch_size"])
        one_by_one = metric is not None or refill
        settings |= {
            "train_batch_size": size,
            "gen_batch_size": 1 if one_by_one else (root["data"].get("gen_batch_size") or size),
            "max_inflight_gen_batches": groups.get("max_inflight_gen_batches", 1) if metric else 1,
        }
    return settings


# Padding rows consist of this token, and they are masked.
_ANY_TOKEN = 0


class StableSteps:
    """Fits verl's mini-batches to the rows of each batch. verl reads their size for each batch.

    verl splits a batch into mini-batches of `ppo_mini_batch_size` * n rows and takes an optimizer step for each. A
    rollout has a row for each segment, so twice the segments would be twice the steps, each over half of the
    rollouts, and the last one over the few rows that are left.

    Invariants:

    - A batch of P prompts has ceil(P / `ppo_mini_batch_size`) mini-batches per epoch, as if each rollout had one row.
    - Mini-batches have the same number of rows. They differ by at most one row that is not padding, if one rank
      trains.
    - A batch has as few padding rows as mini-batches and ranks allow: `loss_agg_mode=seq-mean-*` divides by all rows.
    - Nothing changes for a batch that has no more rows than rollouts were requested.
    """

    def __init__(self, config: Any) -> None:
        """`config` is verl's whole tree of settings, the one that its trainer reads."""
        sections = [config.actor_rollout_ref.actor, *([config.critic] if need_critic(config) else [])]
        self._sections = [
            (section, int(section.ppo_mini_batch_size), mini_batch_unit(config, section)) for section in sections
        ]
        self._n = int(config.actor_rollout_ref.rollout.n)

    def apply(self, batch: KVBatchMeta, prompts: int) -> KVBatchMeta:
        """Set the size of mini-batches for a batch of `prompts` prompts. Return the batch, padded if necessary."""
        least = math.lcm(*(size for _, size, _ in self._sections))
        whole = math.ceil(prompts / least) * least
        # Assume that each rollout has one row.
        rows = whole * self._n
        if len(batch) > rows:
            unit = math.lcm(*(whole // size * unit for _, size, unit in self._sections))
            rows = math.ceil(len(batch) / unit) * unit
        for section, size, _ in self._sections:
            section.ppo_mini_batch_size = rows // (whole // size * self._n)
        mini_batches = whole // min(size for _, size, _ in self._sections)
        if mini_batches == 1 or len(batch) < mini_batches:
            # verl pads the batch to whole mini-batches.
            return batch
        padded = upsample_batch_to_divisible_size(batch, rows, _ANY_TOKEN)
        padded.reorder(_spread(len(batch), len(padded)))
        return padded


def _spread(rows: int, total: int) -> list[int]:
    """Return the order of `total` rows in which the first `rows` of them are evenly spread among the others."""
    row, padding = iter(range(rows)), iter(range(rows, total))
    return [next(row if (i + 1) * rows // total > i * rows // total else padding) for i in range(total)]
