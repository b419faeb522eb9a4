"""The manager class that verl loads by name: runs verl's batches as steps of this backend and returns them as rows.

One class serves both trainers. The v1 trainer passes a TensorDict, must not be blocked, and reads rows and a status
from TransferQueue. The legacy trainer passes a DataProto and waits for one.

Invariants for v1:

- Each prompt gets exactly one terminal status, and no row after it.
- A group that is not usable writes no row, so nothing of it can reach a baseline.
- If a step fails as a whole, its prompts are marked as failed and the next call raises the reason.

Invariant for both, if verl's servers sleep between batches: verl sees a batch as complete only when no model call is
in flight and every server is idle. A server that is busy when verl releases its memory crashes, and so does one that
is asked to generate before its memory is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

from agent_wrapper.contract import Rollout
from rollout_backend.base.retry import repeat
from rollout_backend.core.earlier_batches import describe_batch, global_step_of
from rollout_backend.core.rows import Rows, mask_group, rows_of
from rollout_backend.core.staleness import staleness
from rollout_backend.core.tasks import Task, priority_of
from rollout_backend.errors import RolloutBackendError
from rollout_backend.manager import BlockingRolloutManager
from rollout_backend.model.serving.supervisor import ServingEvent
from rollout_backend.run.accounts.step_report import GroupResult, StepResult
from rollout_backend.verl import early_checks, row_formats, verl_api
from rollout_backend.verl.advantage import needs_row_uids, row_uid, takes_rows_for_rollouts
from rollout_backend.verl.async_batches import AsyncBatches, StepNumbers
from rollout_backend.verl.metrics import TALLY, as_metrics, count_group
from rollout_backend.verl.row_images import load_vision_inputs
from rollout_backend.verl.server_list import ServerList, VllmServers
from rollout_backend.verl.task_rows import TaskIds, payload_of, private_of
from rollout_backend.verl.unsupported import refuse_unsupported
from rollout_backend.verl.v1_batch import (
    QueueRow,
    QueueWriter,
    V1Batch,
    global_step,
    is_validation,
    rows_of_tensordict,
)
from rollout_backend.verl.verl_settings import (
    adapter_of,
    engine_of,
    engine_urls,
    is_asynchronous,
    last_global_step,
    resumes_steps,
    sampling_of,
    settings_of,
)
from rollout_backend.views.page.report import try_to_write_report

log = logging.getLogger(__name__)

# A poll is one call to verl's load balancer actor, which answers from memory.
_FOLLOW_EVERY_S = 0.25
_CLOSE_S = 60.0
_GREEDY = "-greedy"
_MAX_EXTRAS = 100


class CloudAgentLoopManager:
    """Runs verl's batches. verl makes it with `create`; it starts gateway, router and queue and ends them at exit."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        load_balancer = verl_api.load_balancer(llm_client)
        on_vllm = engine_of(self._rollout) == "vllm"
        self._addresses: Callable[[], list[str]] = (
            VllmServers(load_balancer).addresses if on_vllm else partial(verl_api.server_addresses, load_balancer)
        )
        addresses = self._addresses()
        self.settings = settings_of(config, addresses)
        early_checks.check_images(config, self.settings)
        self._legacy = not config.trainer.use_v1
        # If the trainer is not asynchronous, the servers sleep between batches.
        self._asynchronous = is_asynchronous(config.trainer)
        self._adapter = adapter_of(config.actor_rollout_ref.model)
        self._last_global_step = last_global_step(config)
        self._step_numbers = StepNumbers(resumes_steps(config.trainer))
        self._row_uids = needs_row_uids(str(config.algorithm.adv_estimator))
        self._own_turns_only = takes_rows_for_rollouts(str(config.algorithm.adv_estimator))
        self._lengths = int(self._rollout.prompt_length), int(self._rollout.response_length)
        self._experts = self.settings.model.expert_shape
        self._pad_token_id = _pad_token_id(self.settings.model.folder)
        self._vision = load_vision_inputs(self.settings.model.folder, wanted=self.settings.gateway.max_images > 0)
        self._blocking = BlockingRolloutManager(self.settings, _ServingLog(), started_by="verl")
        manager = self._blocking.manager
        self._async_batches = AsyncBatches(self._blocking, self.settings, config.trainer)
        self._servers = ServerList(engine_urls(addresses), self._urls, manager.follow_engines, labelled=on_vllm)
        self._batches_in_flight = 0
        self._pausing = asyncio.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        self._writer = QueueWriter(self._queue_rows, self._on_write_error)
        self._blocking.__enter__()
        # `atexit` runs too late: no thread pool accepts work by then, and a step that ends needs several.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]
        if not self._asynchronous:
            self._blocking.wait_for(self._pause())
        self._follow = self._blocking.submit(repeat(self._follow_servers, "following verl's servers"))

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
        # Accept arguments of other verl versions, so that the error names the version.
        **_: Any,
    ) -> Self:
        """Make the manager; verl calls this.

        Raises:
            ConfigError, PreflightError, StartupError: the run cannot start; no rollout was dispatched. The message
                says what to change.
        """
        verl_api.check_version()
        refuse_unsupported(config)
        early_checks.warn_if_late(config)
        return cls(config, llm_client)

    def close(self) -> None:
        """End the servers and any step in flight. Runs at the end of the process and takes at most a minute."""
        if self._closed:
            return
        self._closed = True
        self._follow.cancel()
        try:
            self._blocking.close(_CLOSE_S, self._failure)
        except TimeoutError:
            log.warning("the backend did not end within %g s; its servers end with this process", _CLOSE_S)
        try_to_write_report(self.settings.run_dir)

    def generate_sequences(self, prompts: Any) -> Any:
        """Roll out a batch of either trainer; see the module's docstring.

        Raises:
            RolloutBackendError: an earlier batch failed as a whole, or (legacy trainer) this one.
        """
        if self._failure is not None:
            raise RolloutBackendError(f"the rollouts of an earlier batch failed: {self._failure}") from self._failure
        if self._legacy:
            return self._roll_out_legacy(prompts)
        self._roll_out_v1(prompts)
        return None

    # --- v1 -----------------------------------------------------------------------------------------------

    def _roll_out_v1(self, prompts: Any) -> None:
        step, validate = global_step(prompts), is_validation(prompts)
        default_n = int(self._rollout.val_kwargs.n if validate else self._rollout.n)
        ids, requests = TaskIds(), []
        for row in rows_of_tensordict(prompts):
            payload = payload_of(row, scored=self.settings.scoring.enabled)
            n = row.get("__rollout_n__")
            rollouts = default_n if n is None else int(n)
            requests.append((row, self._task(row, ids.of(row, payload), payload, validate, rollouts)))
        if self._asynchronous:
            batches = self._async_batches.divide(requests, step, validate)
        else:
            number, same_weights = self._step_numbers.next(step, validate)
            batches = [(V1Batch(number, requests, validate), same_weights)]
        for batch, resumes in batches:
            batch.set_running()
            self._start_v1(batch, _weight_version(step, validate), resumes)

    def _start_v1(self, batch: V1Batch, version: int, resumes: bool) -> None:
        def on_group(group: GroupResult) -> None:
            if batch.report(group):
                self._writer.submit(batch, group.task.task_id, group)

        future = self._blocking.submit(self._collect(batch.tasks, batch.number, resumes, version, on_group))
        future.add_done_callback(lambda done: self._on_v1_end(batch, done))

    def _queue_rows(self, batch: V1Batch, group: GroupResult) -> list[QueueRow]:
        """Return all rows of a group; none if it is not trained."""
        uid, base = batch.uid(group.task.task_id), batch.prompts[group.task.task_id]
        step, order = int(base["global_steps"]), batch.order(group.task.task_id)
        # Validation has no advantages, and verl groups its metrics by the prompt's uid.
        by_row = self._row_uids and not batch.validates
        rows_by_rollout = self._rows_of_group(group, batch.validates, self._own_turns_only, batch.relabel)
        TALLY.add(batch.partition, count_group(group, rows_by_rollout))
        found: list[QueueRow] = []
        for session, (rollout, made) in enumerate(zip(group.rollouts, rows_by_rollout, strict=False)):
            extras = reward_extra_info(rollout, batch.validates)
            for row in made:
                key = row_uid(uid, session, row.index)
                columns = {**base, "session_id": session, "uid": key if by_row else uid}
                fields = row_formats.v1_fields(row, columns, extras, self._vision)
                found.append(
                    (key, fields, row_formats.v1_tag(row, step, _weight_version(step, batch.validates)) | order)
                )
        return found

    def _on_v1_end(self, batch: V1Batch, done: Future[StepResult]) -> None:
        if batch.last is not None:
            self._writer.submit(batch, batch.last.task.task_id, batch.last)
        error = done.exception() if not done.cancelled() else None
        if error is None and not done.cancelled():
            _log_step(done.result())
            return
        self._failure = error or RolloutBackendError("the step was cancelled")
        log.error("a batch failed as a whole: %s", self._failure)
        for task_id in batch.prompts.keys() - batch.reported:
            self._writer.submit(batch, task_id, None)

    def _on_write_error(self, error: BaseException) -> None:
        log.error("writing rows to TransferQueue failed", exc_info=error)
        self._failure = error

    # --- legacy -------------------------------------------------------------------------------------------

    def _roll_out_legacy(self, prompts: Any) -> Any:
        began = time.monotonic()
        validate = bool(prompts.meta_info.get("validate", False))
        version = _weight_version(prompts.meta_info["global_steps"], validate)
        # Indices in the batch, by task. This trainer's batch has a row for each rollout.
        places: dict[str, list[int]] = {}
        ids, first = TaskIds(), dict[str, tuple[dict[str, Any], dict[str, Any]]]()
        for i in range(len(prompts)):
            row = {key: values[i] for key, values in prompts.non_tensor_batch.items()}
            payload = payload_of(row, scored=self.settings.scoring.enabled)
            task_id = ids.of(row, payload) + (_GREEDY if _is_greedy(row) else "")
            places.setdefault(task_id, []).append(i)
            first.setdefault(task_id, (row, payload))
        tasks = [
            self._task(row, task_id, payload, validate, len(places[task_id]))
            for task_id, (row, payload) in first.items()
        ]
        step, same_weights = self._step_numbers.next(int(prompts.meta_info["global_steps"]), validate)
        result = self._blocking.wait_for(self._collect(tasks, step, same_weights, version))
        _log_step(result)
        slots, counts = self._fill_slots(result, places, len(prompts), validate)
        return self._legacy_output(slots, counts, result, version, began, validate)

    def _fill_slots(
        self, result: StepResult, places: Mapping[str, Sequence[int]], size: int, validate: bool
    ) -> tuple[list[Rows | None], Counter[str]]:
        """Put each rollout's rows into its slot of the batch, and count what is left out."""
        made = {group.task.task_id: self._rows_of_group(group, validate) for group in result.groups}
        # REMAX takes a missing baseline for a reward of 0, so a prompt without its baseline is left out.
        without_baseline = {task_id for task_id in made if not any(made.get(f"{task_id}{_GREEDY}", [True]))}
        slots: list[Rows | None] = [None] * size
        counts: Counter[str] = Counter()
        for group in result.groups:
            task_id = group.task.task_id
            of_group = [] if task_id in without_baseline else made[task_id]
            counts.update(count_group(group, of_group))
            for place, of_rollout in zip(places[task_id], of_group, strict=False):
                slots[place] = of_rollout
        return slots, counts

    def _legacy_output(
        self,
        slots: list[Rows | None],
        counts: Counter[str],
        result: StepResult,
        version: int,
        began: float,
        validate: bool,
    ) -> Any:
        batch = row_formats.legacy_batch(
            slots,
            *self._lengths,
            self._pad_token_id,
            self._vision,
            None if validate else self._experts,
        )
        if batch.left_out_tokens:
            log.warning("%d sampled tokens of further segments are not trained", batch.left_out_tokens)
        counts["left_out_tokens"] = batch.left_out_tokens
        counts["moved_turn_rewards"] += batch.moved_turn_rewards
        parts = [row.versions(fallback=version) for of_rollout in slots for row in of_rollout or ()]
        counts["trained_tokens"] = sum(tokens for tokens, _, _ in parts)
        lag = result.report.lag
        extras = {"missing": batch.missing} | ({"acc": row_formats.validation_rewards(batch)} if validate else {})
        return verl_api.DataProto(
            batch=batch.tensors,
            non_tensor_batch={**batch.non_tensors, **extras},
            meta_info={
                # The only values that this trainer logs for us, under timing_s/.
                "timing": {
                    "agent_loop/collect": time.monotonic() - began,
                    "agent_loop/lag/p50": lag.p50 if lag else 0.0,
                    **as_metrics(counts, int((~batch.missing).sum())),
                    **staleness(parts, version),
                },
                "reward_extra_keys": [*extras],
            },
        )

    # --- both ---------------------------------------------------------------------------------------------

    def _task(
        self, row: Mapping[str, Any], task_id: str, payload: dict[str, Any], validate: bool, rollouts: int
    ) -> Task:
        return Task(
            task_id=task_id,
            payload=payload,
            rollouts=rollouts,
            sampling=sampling_of(self._rollout, validate=validate, greedy=_is_greedy(row)).model_copy(
                update={"seed": self.settings.sampling.seed}
            ),
            priority=priority_of(row),
            private=private_of(row, scored=self.settings.scoring.enabled),
        )

    async def _collect(
        self,
        tasks: Sequence[Task],
        step: int,
        same_weights: bool,
        version: int,
        on_group: Callable[[GroupResult], None] = lambda group: None,
    ) -> StepResult:
        async with self._engines_awake():
            await self._servers.begin_batch(version)
            result = await self._blocking.manager.collect(
                tasks,
                step=step,
                # In asynchronous modes the weights change while the step runs.
                weights="" if self._asynchronous else str(version),
                same_weights=same_weights,
                allow_subset=self._asynchronous,
                on_group=on_group,
                adapter=self._adapter,
            )
            if self._last_global_step is not None and global_step_of(step) >= self._last_global_step:
                self._blocking.manager.archive.write_last_step_end()
            return result

    @contextlib.asynccontextmanager
    async def _engines_awake(self) -> AsyncIterator[None]:
        """Send model calls to verl's servers while a batch is in flight; hold them while the servers sleep."""
        if self._asynchronous:
            yield
            return
        manager = self._blocking.manager
        self._batches_in_flight += 1
        try:
            async with self._pausing:
                await manager.resume_engines()
            yield
        finally:
            self._batches_in_flight -= 1
            async with self._pausing:
                if not self._batches_in_flight and not self._closed:
                    await self._pause()

    async def _pause(self) -> None:
        try:
            await self._blocking.manager.pause_engines()
        except RolloutBackendError as error:
            log.warning("model calls may reach servers that verl has put to sleep: %s", error)

    def _rows_of_group(
        self,
        group: GroupResult,
        validate: bool,
        own_turns_only: bool = False,
        relabel: Callable[[Rollout], Rollout] = lambda rollout: rollout,
    ) -> list[Rows]:
        """Return the rows of each rollout; none if the group is not usable. Validation compares no rollouts."""
        if not (group.usable or validate):
            return []
        made = [self._make_rows(relabel(rollout), validate, own_turns_only) for rollout in group.rollouts]
        masks = () if validate else self.settings.training.mask
        return mask_group(group.rollouts, made, masks, self.settings.group.needed)

    def _make_rows(self, rollout: Rollout, validate: bool, own_turns_only: bool) -> Rows:
        if validate:
            # Validation metrics use the final reward, and nothing is trained.
            rollout = rollout.model_copy(update={"turn_rewards": ()})
        image_token = None if self._vision is None else self._vision.image_token
        # Validation trains nothing, so its rows need no routing.
        made = rows_of(rollout, *self._lengths, image_token, own_turns_only, None if validate else self._experts)
        if made.masked:
            log.warning("rollout %s is not trained: a segment lacks the model's routed experts", rollout.rollout_id)
        if made.truncated_tokens or made.unknown_logprobs:
            log.warning(
                "rollout %s: %d sampled tokens did not fit and %d have no logprob (forced formats): not trained",
                rollout.rollout_id,
                made.truncated_tokens,
                made.unknown_logprobs,
            )
        return made

    async def _urls(self) -> list[str]:
        return engine_urls(await asyncio.to_thread(self._addresses))

    async def _follow_servers(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_EVERY_S)
            if not self._asynchronous and not self._batches_in_flight:
                continue
            try:
                await self._servers.refresh()
            except RolloutBackendError as error:
                log.warning("updating the list of verl's servers failed, retrying: %s", error)


def _log_step(result: StepResult) -> None:
    """Log a step's summary, as a warning if rollouts were left out."""
    report = result.report
    explained = [failure for failure in result.failures if failure.message]
    log.log(
        logging.WARNING if report.reasons else logging.INFO,
        "step %s: %d planned, %d trainable, %d of %d groups usable, tokens by version %s, left out: %s%s",
        describe_batch(result.step)[0],
        report.planned,
        report.trainable,
        sum(group.usable for group in result.groups),
        len(result.groups),
        report.weight_versions,
        report.reasons or "none",
        "".join(f"; {failure.rollout_id}: {failure.message}" for failure in explained[:1]),
    )


class _ServingLog:
    """Logs the events of servers. verl's log shows only warnings."""

    def __init__(self) -> None:
        # Why each server last died.
        self._causes: dict[str, str] = {}

    def __call__(self, event: ServingEvent) -> None:
        # We restart the router, the gateways and the dialer, and verl its engines. The end of ours is a warning once
        # it is restarted: at the end of a run Ray ends it before this process.
        ours = event.server.startswith(("router", "gateway", "dialer"))
        detail = event.detail
        if event.kind == "died":
            self._causes[event.server] = detail
        elif event.kind == "restarted":
            detail = self._causes.get(event.server, "")
        warns = event.kind in ("gave_up", "restarted" if ours else "died")
        text = f"{event.server} {event.kind}: {detail}" if detail else f"{event.server} {event.kind}"
        log.log(logging.WARNING if warns else logging.INFO, "%s", text)


def _weight_version(global_steps: Any, validate: bool) -> int:
    """Return the version that the servers hold: verl updates them at the end of a step, and validates after that."""
    return int(global_steps) if validate else max(0, int(global_steps) - 1)


def _is_greedy(row: Mapping[str, Any]) -> bool:
    do_sample = row.get("__do_sample__")
    return do_sample is not None and not bool(do_sample)


def _pad_token_id(model: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(pad or 0)


def reward_extra_info(rollout: Rollout, validate: bool) -> dict[str, float]:
    """Return the agent's numeric extras: verl's validation logs their means, and its group filter can read one.

    At most the first `_MAX_EXTRAS` count, because each name becomes a metric. The filter finds the reward under
    verl's usual names, too. A metric "acc" of validation would count lost rollouts as 0. verl adds "reward" itself.
    """
    extras = rollout.extras.items()
    numbers = ((key, float(value)) for key, value in extras if isinstance(value, int | float) and key != "reward")
    found = dict(islice(numbers, _MAX_EXTRAS))
    if validate or rollout.reward is None:
        return found
    return dict.fromkeys(("acc", "score"), rollout.reward) | found
