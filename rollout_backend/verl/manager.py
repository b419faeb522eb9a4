"""The manager class that verl loads by name: its batches become steps of this backend, and come back as rows.

One class for both trainers. The v1 trainer hands over a TensorDict, must not be blocked, and finds rows and a status
in TransferQueue; the legacy trainer hands over a DataProto and waits for one. What must always hold for v1:

- each prompt gets exactly one terminal status, and no row after it;
- a group that is not usable writes no row at all: nothing of it can reach a baseline;
- if a step fails as a whole, its prompts are marked failed and the next call raises the reason.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import ray
import torch

from rollout_backend.errors import ConfigError, RolloutBackendError
from rollout_backend.manager import BlockingRolloutManager
from rollout_backend.report import GroupResult, StepResult
from rollout_backend.tasks import Task
from rollout_backend.verl import rows
from rollout_backend.verl.dataset import payload_of
from rollout_backend.verl.settings import engine_urls, sampling_of, settings_of

log = logging.getLogger(__name__)

_FOLLOW_EVERY_S = 5.0
_CONTROL = ("validate", "__rollout_n__", "__do_sample__")  # verl's word to us, not the agent's data


class CloudAgentLoopManager:
    """Made by verl with `create`. Starts the run's gateway, router and queue at once, and ends them with the process."""

    def __init__(self, config: Any, llm_client: Any, replay_buffer: Any = None) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._llm_client = llm_client
        self._replay_buffer = replay_buffer  # 0.8.0's trainer wants its prompts announced there
        self.settings = settings_of(config, self._addresses())
        self._blocking = BlockingRolloutManager(self.settings)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="transfer-queue")
        self._running: set[Future[Any]] = set()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._blocking.__enter__()
        atexit.register(self.close)
        self._follow = self._blocking.submit(self._follow_engines())

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
        replay_buffer: Any = None,
    ) -> Self:
        """verl's way to make one.

        Raises:
            ConfigError, PreflightError, StartupError: before a rollout is spent, and what to change.
        """
        if teacher_client is not None:
            raise ConfigError("on-policy distillation needs verl's own agent loop: the teacher is not reached from here")
        return cls(config, llm_client, replay_buffer)

    def close(self) -> None:
        """Ends what was started. Called at the end of the process, too."""
        atexit.unregister(self.close)
        self._follow.cancel()
        self._blocking.__exit__(None, None, None)
        self._writer.shutdown()

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
        tasks = []
        for row in _rows_of_tensordict(prompts):
            task = self._task(row, str(row["uid"]), validate, default_n=self._default_n(validate))
            batch.rows[task.task_id] = {key: value for key, value in row.items() if key not in _CONTROL}
            tasks.append(task)
        if self._replay_buffer is not None:
            running = {uid: {"global_steps": row["global_steps"], "status": "running"} for uid, row in batch.rows.items()}
            self._replay_buffer.add(batch.partition, running)
        for uid in batch.rows:
            tq.kv_put(key=uid, partition_id=batch.partition, tag={"status": "running"})
        work = self._blocking.manager.collect(
            tasks, on_group=lambda group: self._write_later(batch, group)
        )
        future = self._blocking.submit(work)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(lambda done: self._v1_ended(batch, done))

    def _write_later(self, batch: _Batch, group: GroupResult) -> None:
        batch.told.add(group.task.task_id)
        self._writer.submit(self._write, batch, group).add_done_callback(self._note_failure)

    def _write(self, batch: _Batch, group: GroupResult) -> None:
        """All of a group's rows, and then its status: in one thread, so nothing comes after it."""
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        uid, base = group.task.task_id, batch.rows[group.task.task_id]
        step = int(base["global_steps"])
        keys, fields, tags = [], [], []
        status = "failure"
        try:
            for session, rollout in enumerate(group.rollouts if group.usable else ()):
                made = rows.rows_of(rollout, self._rollout.prompt_length, self._rollout.response_length)
                for row in made:
                    keys.append(f"{uid}_{session}_{row.index}")
                    fields.append(rows.v1_fields(row, {**base, "session_id": session}))
                    tags.append(rows.v1_tag(row, step))
            if keys:
                data = list_of_dict_to_tensordict(fields)
                tq.kv_batch_put(keys=keys, partition_id=batch.partition, fields=data, tags=tags)
                status = "finished"
        finally:
            tq.kv_put(key=uid, partition_id=batch.partition, tag={"status": status})

    def _v1_ended(self, batch: _Batch, done: Future[StepResult]) -> None:
        with self._lock:
            self._running.discard(done)
        error = done.exception() if not done.cancelled() else None
        if error is None and not done.cancelled():
            self._tell(done.result())
            return
        self._failure = error or RolloutBackendError("the step was cancelled")
        log.error("a batch failed as a whole: %s", self._failure)
        for uid in batch.rows.keys() - batch.told:
            self._writer.submit(_mark_failed, uid, batch.partition)

    def _note_failure(self, written: Future[None]) -> None:
        error = written.exception()
        if error is not None:
            log.error("rows could not be handed to the trainer", exc_info=error)
            self._failure = error

    # --- legacy -------------------------------------------------------------------------------------------

    def _legacy(self, prompts: Any) -> Any:
        raise NotImplementedError

    # --- both ---------------------------------------------------------------------------------------------

    def _task(self, row: Mapping[str, Any], task_id: str, validate: bool, default_n: int) -> Task:
        greedy = not bool(row.get("__do_sample__", True))
        return Task(
            task_id=task_id,
            payload=payload_of(row),
            rollouts=int(row.get("__rollout_n__", default_n)),
            sampling=sampling_of(self._rollout, validate=validate, greedy=greedy),
        )

    def _default_n(self, validate: bool) -> int:
        return int(self._rollout.val_kwargs.n if validate else self._rollout.n)

    def _tell(self, result: StepResult) -> None:
        report = result.report
        left_out = Counter({reason: count for reason, count in report.reasons.items()})
        log.warning(
            "step %d: %d planned, %d trainable, %d of %d groups usable, left out: %s",
            result.step,
            report.planned,
            report.trainable,
            sum(group.usable for group in result.groups),
            len(result.groups),
            dict(left_out) or "none",
        )

    def _addresses(self) -> list[str]:
        # Not public, but the only way from the client to the servers that have joined by now.
        return sorted(ray.get(self._llm_client._load_balancer.get_all_servers.remote()))

    async def _follow_engines(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_EVERY_S)
            addresses = await asyncio.to_thread(self._addresses)
            await self._blocking.manager.follow_engines(engine_urls(addresses))


class _Batch:
    """A v1 batch that is being rolled out. `told`: the prompts whose rows and status are written, or will be."""

    def __init__(self, partition: str) -> None:
        self.partition = partition
        self.rows: dict[str, dict[str, Any]] = {}
        self.told: set[str] = set()


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
                raise TypeError(f"verl's batch holds {key!r} as a {type(value).__name__}, which is not understood here")
        yield row


_ = np
