"""The manager class that verl loads by name: its batches become steps of this backend, and come back as rows.

One class for both trainers. The v1 trainer hands over a TensorDict, must not be blocked, and finds rows and a status
in TransferQueue; the legacy trainer hands over a DataProto and waits for one. What must always hold for v1:

- each prompt gets exactly one terminal status, and no row after it;
- a group that is not usable writes no row at all: nothing of it can reach a baseline;
- if a step fails as a whole, its prompts are marked failed and the next call raises the reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import ray
import torch

from agent_wrapper.contract import Rollout
from rollout_backend.errors import ConfigError, RolloutBackendError
from rollout_backend.manager import BlockingRolloutManager
from rollout_backend.report import GroupResult, StepResult
from rollout_backend.serving.fleet import ServingEvent
from rollout_backend.tasks import Task
from rollout_backend.verl import preflight, rows
from rollout_backend.verl.advantage import knows_sessions, row_uid
from rollout_backend.verl.dataset import payload_of
from rollout_backend.verl.metrics import TALLY, count_group, named, staleness
from rollout_backend.verl.numbers import StepNumbers
from rollout_backend.verl.settings import engine_urls, sampling_of, settings_of, takes_up
from rollout_backend.verl.versions import VersionLabels
from rollout_backend.verl.vision import load_vision

log = logging.getLogger(__name__)

_FOLLOW_EVERY_S = 5.0
_CLOSE_S = 60.0
_GREEDY = "-greedy"
_CONTROL = ("validate", "__rollout_n__", "__do_sample__")  # verl's word to us, not the agent's data


class CloudAgentLoopManager:
    """Made by verl with `create`. Starts the run's gateway, router and queue, and ends them with the process."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._llm_client = llm_client
        addresses = self._addresses()
        self.settings = settings_of(config, addresses)
        self._urls = engine_urls(addresses)
        self._labels = VersionLabels()
        self._numbers = StepNumbers(takes_up(config.trainer))
        self._row_uids = knows_sessions(str(config.algorithm.adv_estimator))
        self._logprobs = not self.settings.collect.retokenise  # every row has the same fields
        self._pad_token_id = _pad_token_id(self.settings.model.path)
        self._vision = load_vision(self.settings.model.path, wanted=self.settings.gateway.max_images > 0)
        self._blocking = BlockingRolloutManager(self.settings, on_serving=_tell_serving)
        self._failure: BaseException | None = None
        self._closed = False
        self._writer = _Writer(self._note_failure)
        self._blocking.__enter__()
        # `atexit` comes too late: no thread takes work by then, and looking up a host's name is a thread's work.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]
        self._follow = self._blocking.submit(self._follow_engines())

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
        **_: Any,  # what other versions of verl hand over: the message is to be about the version
    ) -> Self:
        """verl's way to make one.

        Raises:
            ConfigError, PreflightError, StartupError: before a rollout is spent, and what to change.
        """
        preflight.check_version()
        if teacher_client is not None:
            raise ConfigError(
                "on-policy distillation needs verl's own agent loop: leave agent_loop_manager_class out"
            )
        return cls(config, llm_client)

    def close(self) -> None:
        """Ends what was started, and steps that still run. Called at the end of the process, for a minute at most."""
        if self._closed:
            return
        self._closed = True
        self._follow.cancel()
        try:
            self._blocking.close(_CLOSE_S)
        except TimeoutError:
            log.warning("the backend was not ended within %g s; its servers end with this process", _CLOSE_S)

    def generate_sequences(self, prompts: Any) -> Any:
        """Takes a batch of either trainer: see the module.

        Raises:
            RolloutBackendError: an earlier batch failed as a whole, or (legacy) this one.
        """
        if self._failure is not None:
            raise RolloutBackendError(f"the rollouts of an earlier batch failed: {self._failure}") from self._failure
        if hasattr(prompts, "non_tensor_batch"):
            return self._legacy(prompts)
        self._v1(prompts)
        return None

    # --- v1 -----------------------------------------------------------------------------------------------

    def _v1(self, prompts: Any) -> None:
        import transfer_queue as tq

        validate = bool(prompts["validate"]) if "validate" in prompts else False
        batch = _Batch("val" if validate else "train")
        tasks, version = [], 0
        for row in _rows_of_tensordict(prompts):
            task = self._task(row, str(row["uid"]), validate, default_n=self._default_n(validate))
            batch.rows[task.task_id] = {key: value for key, value in row.items() if key not in _CONTROL}
            version = _version(row["global_steps"], validate)
            tasks.append(task)
        for uid in batch.rows:
            tq.kv_put(key=uid, partition_id=batch.partition, tag={"status": "running"})
        number = self._numbers.next(_global_step(prompts), validate)
        work = self._collect(tasks, number, version, on_group=lambda group: self._write_later(batch, group))
        future = self._blocking.submit(work)
        future.add_done_callback(lambda done: self._v1_ended(batch, done))

    def _write_later(self, batch: _Batch, group: GroupResult) -> None:
        batch.told.add(group.task.task_id)
        self._writer.submit(functools.partial(self._write, batch, group))

    def _write(self, batch: _Batch, group: GroupResult) -> None:
        """All of a group's rows, and then its status: in one thread, so nothing comes after it."""
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        uid, base = group.task.task_id, batch.rows[group.task.task_id]
        step = int(base["global_steps"])
        keys, fields, tags = [], [], []
        status = "failure"
        try:
            made = [self._rows(rollout) for rollout in group.rollouts] if group.usable else []
            TALLY.add(batch.partition, count_group(group, made))
            for session, (rollout, of_rollout) in enumerate(zip(group.rollouts, made, strict=False)):
                for row in of_rollout:
                    key = row_uid(uid, session, row.index)
                    # Validation has no advantages, and groups its metrics by the prompt's uid.
                    by_row = self._row_uids and batch.partition == "train"
                    own = {"session_id": session, "uid": key if by_row else uid}
                    numbers = _numbers(rollout)
                    fields.append(rows.v1_fields(row, {**base, **own}, numbers, self._logprobs, self._vision))
                    tags.append(rows.v1_tag(row, step, _version(step, batch.partition == "val")))
                    keys.append(key)
            if keys:
                data = list_of_dict_to_tensordict(fields)
                tq.kv_batch_put(keys=keys, partition_id=batch.partition, fields=data, tags=tags)
                status = "finished"
        finally:
            tq.kv_put(key=uid, partition_id=batch.partition, tag={"status": status})

    def _v1_ended(self, batch: _Batch, done: Future[StepResult]) -> None:
        error = done.exception() if not done.cancelled() else None
        if error is None and not done.cancelled():
            self._tell(done.result())
            return
        self._failure = error or RolloutBackendError("the step was cancelled")
        log.error("a batch failed as a whole: %s", self._failure)
        for uid in batch.rows.keys() - batch.told:
            self._writer.submit(functools.partial(_mark_failed, uid, batch.partition))

    def _note_failure(self, error: BaseException) -> None:
        log.error("rows could not be handed to the trainer", exc_info=error)
        self._failure = error

    # --- legacy -------------------------------------------------------------------------------------------

    def _legacy(self, prompts: Any) -> Any:
        from verl import DataProto

        began = time.monotonic()
        validate = bool(prompts.meta_info.get("validate", False))
        version = _version(prompts.meta_info["global_steps"], validate)
        places: dict[str, list[int]] = {}  # of each task's rollouts in the batch
        tasks: dict[str, Task] = {}
        for i in range(len(prompts)):
            row = {key: values[i] for key, values in prompts.non_tensor_batch.items()}
            task_id = f"{row['uid']}{_GREEDY}" if _is_greedy(row) else str(row["uid"])
            places.setdefault(task_id, []).append(i)
            if task_id not in tasks:
                tasks[task_id] = self._task(row, task_id, validate, default_n=0)
        wanted = [dataclasses.replace(task, rollouts=len(places[task_id])) for task_id, task in tasks.items()]
        number = self._numbers.next(int(prompts.meta_info["global_steps"]), validate)
        result = self._blocking.wait_for(self._collect(wanted, number, version))
        self._tell(result)
        slots: list[rows.Rows | None] = [None] * len(prompts)
        counts: Counter[str] = Counter()
        made = {
            group.task.task_id: [self._rows(rollout) for rollout in group.rollouts]
            if group.usable or validate
            else []
            for group in result.groups
        }
        # REMAX takes a baseline that is not there for a reward of 0, so without one its prompt is left out.
        without = {task_id for task_id in made if not any(made.get(f"{task_id}{_GREEDY}", [True]))}
        for group in result.groups:
            task_id = group.task.task_id
            of_group = [] if task_id in without else made[task_id]
            counts.update(count_group(group, of_group))
            for place, of_rollout in zip(places[task_id], of_group, strict=False):
                slots[place] = of_rollout
        lengths = int(self._rollout.prompt_length), int(self._rollout.response_length)
        batch = rows.legacy_batch(slots, *lengths, self._pad_token_id, self._logprobs, self._vision)
        if batch.left_out_tokens:
            log.warning("%d sampled tokens of further segments are not trained", batch.left_out_tokens)
        counts["left_out_tokens"] = batch.left_out_tokens
        parts = [row.versions(fallback=version) for of_rollout in slots for row in of_rollout or ()]
        report = result.report
        return DataProto(
            batch=batch.tensors,
            non_tensor_batch={**batch.non_tensors, "missing": batch.missing},
            meta_info={
                # The one thing of ours that this trainer logs, under timing_s/
                "timing": {
                    "agent_loop/collect": time.monotonic() - began,
                    "agent_loop/lag/p50": report.lag.p50 if report.lag else 0.0,
                    **named(counts, int((~batch.missing).sum())),
                    **staleness(parts, version),
                },
                "reward_extra_keys": ["missing"],
            },
        )

    # --- both ---------------------------------------------------------------------------------------------

    def _task(self, row: Mapping[str, Any], task_id: str, validate: bool, default_n: int) -> Task:
        n = row.get("__rollout_n__")
        return Task(
            task_id=task_id,
            payload=payload_of(row),
            rollouts=default_n if n is None else int(n),
            sampling=sampling_of(self._rollout, validate=validate, greedy=_is_greedy(row)),
        )

    async def _collect(
        self,
        tasks: Sequence[Task],
        number: tuple[int, bool],
        version: int,
        on_group: Callable[[GroupResult], None] = lambda group: None,
    ) -> StepResult:
        await self._labels.say(self._urls, version)
        step, same_weights = number
        return await self._blocking.manager.collect(
            tasks, step=step, weights=str(version), same_weights=same_weights, on_group=on_group
        )

    def _rows(self, rollout: Rollout) -> rows.Rows:
        image_token = None if self._vision is None else self._vision.image_token
        lengths = int(self._rollout.prompt_length), int(self._rollout.response_length)
        made = rows.rows_of(rollout, *lengths, image_token)
        if made.truncated_tokens or made.unknown_logprobs:
            log.warning(
                "rollout %s: %d sampled tokens did not fit and %d have no logprob; they are not trained",
                rollout.rollout_id,
                made.truncated_tokens,
                made.unknown_logprobs,
            )
        return made

    def _default_n(self, validate: bool) -> int:
        return int(self._rollout.val_kwargs.n if validate else self._rollout.n)

    def _tell(self, result: StepResult) -> None:
        report = result.report
        explained = [failure for failure in result.failures if failure.message]
        # What is left out must be seen; that all is well need not.
        log.log(
            logging.WARNING if report.reasons else logging.INFO,
            "step %d: %d planned, %d trainable (%d re-tokenised), %d of %d groups usable, tokens by version %s, "
            "left out: %s%s",
            result.step,
            report.planned,
            report.trainable,
            report.retokenised,
            sum(group.usable for group in result.groups),
            len(result.groups),
            report.weight_versions,
            report.reasons or "none",
            "".join(f"; {failure.rollout_id}: {failure.message}" for failure in explained[:1]),
        )

    def _addresses(self) -> list[str]:
        # Not public, but the only way from the client to the servers that have joined by now.
        return sorted(ray.get(self._llm_client._load_balancer.get_all_servers.remote()))

    async def _follow_engines(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_EVERY_S)
            try:
                self._urls = engine_urls(await asyncio.to_thread(self._addresses))
                await self._blocking.manager.follow_engines(self._urls)
            except (RolloutBackendError, ray.exceptions.RayError) as error:
                log.warning("verl's servers could not be followed, and are asked for again: %s", error)


class _Writer:
    """One thread that writes to TransferQueue, in order. A daemon: TransferQueue may be gone before the last write is
    done, which then never ends and must not keep the process from ending."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transfer-queue", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except Exception as error:
                self._failed(error)


class _Batch:
    """A v1 batch that is being rolled out. `told`: the prompts whose rows and status are written, or will be."""

    def __init__(self, partition: str) -> None:
        self.partition = partition
        self.rows: dict[str, dict[str, Any]] = {}
        self.told: set[str] = set()


def _global_step(prompts: Any) -> int:
    """Of the whole batch: verl gives each of its rows the same."""
    return int(next(_rows_of_tensordict(prompts))["global_steps"])


def _tell_serving(event: ServingEvent) -> None:
    # A router is mended, and Ray ends it first when the run is over; an engine is verl's to mend.
    lost = event.kind == "died" and event.server != "router"
    log.log(logging.WARNING if lost else logging.INFO, "%s %s %s", event.server, event.kind, event.detail)


def _mark_failed(uid: str, partition: str) -> None:
    import transfer_queue as tq

    tq.kv_put(key=uid, partition_id=partition, tag={"status": "failure"})


def _rows_of_tensordict(prompts: Any) -> Iterator[dict[str, Any]]:
    from tensordict import NonTensorData, NonTensorStack

    for i in range(len(prompts)):
        row: dict[str, Any] = {}
        for key, value in prompts.items():
            if isinstance(value, torch.Tensor):
                row[key] = value[i]
            elif isinstance(value, NonTensorStack):
                row[key] = value[i].data
            elif isinstance(value, NonTensorData):
                row[key] = value.data
            else:
                raise TypeError(f"verl's batch holds {key!r} as a {type(value).__name__}, which is not known here")
        yield row


def _version(global_steps: Any, validate: bool) -> int:
    """Of the weights that the servers have: verl gives them out at the end of a step, and validates after that."""
    return int(global_steps) if validate else max(0, int(global_steps) - 1)


def _is_greedy(row: Mapping[str, Any]) -> bool:
    do_sample = row.get("__do_sample__")
    return do_sample is not None and not bool(do_sample)


def _pad_token_id(model: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(pad or 0)


def _numbers(rollout: Rollout) -> dict[str, float]:
    """What the agent returned beside its reward, as far as verl's validation can take the mean of it."""
    extras = rollout.extras.items()
    return {key: float(value) for key, value in extras if isinstance(value, int | float) and key != "reward"}
