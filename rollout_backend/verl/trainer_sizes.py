"""How verl's trainer divides a batch among ranks, mini-batches and micro-batches, and checks of these sizes.

verl checks them in its first update, when the first step has been sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rollout_backend.base.check_result import CheckResult, Level

_SEGMENTS = 8
"""Rows of a rollout for which TransferQueue should have room: a rollout has one for each of its segments."""
_PADDED_BYTES = 93
"""Memory of verl's trainer for each token of a batch's responses, each padded to the longest, while it computes
metrics: `benchmarks/large_rows.py` measures it."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def data_parallel_size(root: Any, section: Any) -> int:
    """Return among how many ranks verl divides a batch. `section` is verl's of the actor or the critic.

    For an engine that is not known here, this is the number of its GPUs, which its ranks divide.
    """
    gpus, engine = int(root.trainer.nnodes) * int(root.trainer.n_gpus_per_node), _engine(section)
    if section.strategy == "megatron":
        if engine.get("dynamic_context_parallel"):
            return 1
        gpus //= int(engine.tensor_model_parallel_size) * int(engine.pipeline_model_parallel_size)
    elif section.strategy == "torchtitan":
        return int(engine.data_parallel_shard_size) * int(engine.data_parallel_replicate_size)
    return max(1, gpus // sequence_parallel_size(section))


def sequence_parallel_size(section: Any) -> int:
    """Return among how many GPUs verl divides the tokens of a row."""
    engine = _engine(section)
    if section.strategy == "megatron":
        return int(engine.context_parallel_size)
    if section.strategy == "torchtitan":
        return int(engine.tensor_parallel_size)
    if section.strategy == "veomni":
        return int(engine.ulysses_parallel_size)
    old = int(section.get("ulysses_sequence_parallel_size") or 1)
    return old if old > 1 else int(engine.get("ulysses_sequence_parallel_size") or 1)


def mini_batch_unit(root: Any, section: Any) -> int:
    """Return the number of rows of which each mini-batch must have a multiple: for ranks, and fixed micro-batches."""
    rollout, ref = root.actor_rollout_ref.rollout, root.actor_rollout_ref.get("ref") or {}
    sizes = [] if section.get("use_dynamic_bsz") else [section.get("ppo_micro_batch_size_per_gpu")]
    sizes += [each.get("log_prob_micro_batch_size_per_gpu") for each in (rollout, ref) if not _is_dynamic(each)]
    micro = math.lcm(*(int(size) for size in sizes if size))
    return math.lcm(int(rollout.n), data_parallel_size(root, section) * micro)


def check_sizes(root: Any, longest: int, trains_critic: bool, has_reference: bool) -> Iterator[CheckResult]:
    """Yield each size with which verl's trainer ends. `longest` is the number of tokens that a row may have."""
    actor, rollout, critic = root.actor_rollout_ref.actor, root.actor_rollout_ref.rollout, root.get("critic")
    trained = [(_ACTOR, actor), *([("critic", critic)] if trains_critic else [])]
    for key, section in trained:
        yield from _check_mini_batch(root, key, section)
    limits = [(key, section, "ppo_max_token_len_per_gpu", section) for key, section in trained]
    limits.append((_ROLLOUT, rollout, "log_prob_max_token_len_per_gpu", actor))
    if trains_critic:
        limits.append(("critic", critic, "forward_max_token_len_per_gpu", critic))
    if has_reference:
        ref = root.actor_rollout_ref.ref
        limits.append(("actor_rollout_ref.ref", ref, "log_prob_max_token_len_per_gpu", actor))
    for key, section, name, worker in limits:
        limit, gpus = section.get(name), sequence_parallel_size(worker)
        if _is_dynamic(section) and limit and longest > int(limit) * gpus:
            text = (
                f"a row may have {longest:,} tokens, and verl's trainer takes {int(limit) * gpus:,} at most: set it "
            )
            text += f"to {-(-longest // gpus)}, or lower data.max_response_length, or divide rows among more GPUs"
            yield CheckResult("problem", f"{key}.{name}", text)


def check_queue(root: Any, batch: int, validation: int | None) -> Iterator[CheckResult]:
    """Yield whether TransferQueue has room for the rows of a batch. A group whose rows it refuses is lost.

    An asynchronous trainer requests batches ahead, which are in the queue together. `batch` and `validation` are the
    numbers of rollouts; None: not known.
    """
    queue: Any = (root.get("transfer_queue") or {}).get("backend") or {}
    if not root.trainer.get("use_v1", True) or queue.get("storage_backend") != "SimpleStorage":
        return
    trainer = root.trainer.get("v1") or {}
    batch *= 1 + int((trainer.get(trainer.get("trainer_mode")) or {}).get("num_warmup_batches") or 0)
    limit, most = queue.SimpleStorage.get("total_storage_size"), max(batch, validation or 0)
    if limit is None or int(limit) >= max(batch * _SEGMENTS, validation or 0):
        return
    text = f"TransferQueue holds {int(limit):,} rows, and {most:,} rollouts that are in it together have a row per "
    text += "segment, at least one each. A group whose rows it refuses is lost: set it to null, which is no limit"
    level: Level = "problem" if most > int(limit) else "warning"
    yield CheckResult(level, "transfer_queue.backend.SimpleStorage.total_storage_size", text)


def check_padding(root: Any, rollouts: int, memory: int) -> Iterator[CheckResult]:
    """Yield a warning if verl's trainer pads the rows of a batch to more bytes than this machine has."""
    longest = int(root.actor_rollout_ref.rollout.response_length)
    needed = rollouts * longest * _PADDED_BYTES
    if not root.trainer.get("use_v1", True) or needed <= memory:
        return
    text = (
        f"verl's trainer pads each row of a batch to the longest: {rollouts:,} responses of {longest:,} tokens take "
    )
    text += f"{needed >> 30:,} GiB of the {memory >> 30:,} GiB of this machine, and a rollout has a row per segment. "
    text += "Lower it or data.train_batch_size, or give the machine of the TaskRunner more memory"
    yield CheckResult("warning", "data.max_response_length", text)


def _check_mini_batch(root: Any, key: str, section: Any) -> Iterator[CheckResult]:
    n, size = int(root.actor_rollout_ref.rollout.n), int(section.ppo_mini_batch_size)
    ranks, unit = data_parallel_size(root, section), mini_batch_unit(root, section)
    if size * n % unit == 0:
        return
    lower = size // (unit // n) * (unit // n)
    near = " or ".join(str(each) for each in (lower, lower + unit // n) if each)
    text = f"{size} prompts of {n} rollouts are {size * n} rows, which cannot be divided among {ranks} ranks"
    text += f" in whole micro-batches: set it to {near}, and data.train_batch_size to a multiple of that"
    yield CheckResult("problem", f"{key}.ppo_mini_batch_size", text)


def _is_dynamic(section: Any) -> bool:
    """Return whether micro-batches follow the rows' tokens. verl names the option in two ways."""
    return bool(section.get("use_dynamic_bsz") or section.get("log_prob_use_dynamic_bsz"))


def _engine(section: Any) -> Any:
    """Return the settings of the section's training engine: those of FSDP have another name in the critic's."""
    name = str(section.strategy)
    return section.get(name) or section.get("fsdp_config") or section.get("fsdp") or {}
