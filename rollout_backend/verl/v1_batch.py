"""A batch of verl's v1 trainer: the prompts read from its TensorDict, and the thread that writes to TransferQueue.

Invariants:

- Each prompt gets exactly one terminal status, after all of its rows. verl waits for it without a limit, so it is
  written again until TransferQueue takes it.
- The last group of a batch is written only when the batch is over, because verl then takes the servers' memory.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_exponential_jitter,
)
from tenacity.stop import StopBaseT

from agent_wrapper.contract import Rollout
from rollout_backend.core.earlier_batches import Origin
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import GroupResult
from rollout_backend.verl import verl_api

log = logging.getLogger(__name__)

Request = tuple[dict[str, Any], Task]
"""A row of verl's batch, and its task."""

# These columns are verl's instructions, not data for the agent.
_CONTROL_COLUMNS = ("validate", "__rollout_n__", "__do_sample__")


class V1Batch:
    """A batch in flight, or the part of one that resumes an earlier step.

    `prompts` holds verl's columns by task id. `reported` holds the ids of tasks that have a result.
    """

    def __init__(
        self,
        number: int,
        requests: Iterable[Request],
        validates: bool = False,
        relabel: Callable[[Rollout], Rollout] = lambda rollout: rollout,
    ) -> None:
        """`number` is the step's number. `relabel` replaces the versions of abandoned weights in resumed rollouts."""
        self.number = number
        self.validates = validates
        self.relabel = relabel
        self.tasks: list[Task] = []
        # In verl's order.
        self.prompts: dict[str, dict[str, Any]] = {}
        for row, task in requests:
            self.tasks.append(task)
            self.prompts[task.task_id] = {key: value for key, value in row.items() if key not in _CONTROL_COLUMNS}
        self.reported: set[str] = set()
        self.last: GroupResult | None = None

    @property
    def partition(self) -> str:
        return "val" if self.validates else "train"

    def set_running(self) -> None:
        """Set each prompt's status, with its origin, for a trainer that resumes from verl's checkpoint."""
        tags = {}
        for task_id, columns in self.prompts.items():
            # verl counts a prompt that it repeats as new.
            requested = {"global_steps": int(columns["global_steps"])}
            tags[self.uid(task_id)] = {"status": "running", **Origin(self.number, task_id).as_tag(), **requested}
        set_tags(self.partition, tags)

    def uid(self, task_id: str) -> str:
        """Return verl's uid of the prompt."""
        return str(self.prompts[task_id]["uid"])

    def order(self, task_id: str) -> dict[str, int]:
        """Return the fields of a row's tag by which `RolloutSampler` orders the rows of a step."""
        return {"batch": self.number, "place": list(self.prompts).index(task_id)}

    def report(self, group: GroupResult) -> bool:
        """Record a group's result. Return False for the last group, which must wait for the end of the batch."""
        self.reported.add(group.task.task_id)
        if len(self.reported) < len(self.prompts):
            return True
        self.last = group
        return False


QueueRow = tuple[str, dict[str, Any], dict[str, Any]]
"""The key, fields and tag of a row in TransferQueue."""

# After this time a group's rows are given up, and a failing status is reported.
_PATIENCE_S = 60.0
# One call writes groups of about this many tokens. A token takes 60 bytes in TransferQueue.
_TOKENS_TOGETHER = 1_000_000


class QueueWriter:
    """A thread that writes groups to TransferQueue, in order. One call writes all groups that wait, because a call
    takes longer than the rows of a group.

    The thread is a daemon: if TransferQueue ends first, a write blocks for ever and must not keep the process alive.
    """

    def __init__(
        self, rows_of: Callable[[V1Batch, GroupResult], list[QueueRow]], on_error: Callable[[BaseException], None]
    ) -> None:
        """`rows_of` returns the rows of a group, or none if the group has failed. Both are called in the thread."""
        self._rows_of = rows_of
        self._on_error = on_error
        self._waiting: queue.SimpleQueue[tuple[V1Batch, str, GroupResult | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transfer-queue", daemon=True).start()

    def submit(self, batch: V1Batch, task_id: str, group: GroupResult | None) -> None:
        """Write the rows of a task's group, then its status. `group` is None if it has failed."""
        self._waiting.put((batch, task_id, group))

    def _run(self) -> None:
        while True:
            together: list[tuple[V1Batch, str, GroupResult | None]] = []
            tokens = 0
            while not together or (tokens < _TOKENS_TOGETHER and not self._waiting.empty()):
                together.append(self._waiting.get())
                group = together[-1][2]
                for segment in (each for rollout in group.rollouts for each in rollout.segments) if group else ():
                    # A token of these segments takes kilobytes.
                    is_large = segment.images or segment.routed_experts is not None
                    tokens += _TOKENS_TOGETHER if is_large else len(segment.token_ids)
            # The rows of a batch have equal columns.
            for batch, groups in itertools.groupby(together, lambda each: each[0]):
                self._write(batch, {task_id: group for _, task_id, group in groups})

    def _write(self, batch: V1Batch, groups: Mapping[str, GroupResult | None]) -> None:
        """Write all rows, then all statuses. A group whose rows cannot be made fails alone."""
        rows: list[QueueRow] = []
        tags = {batch.uid(task_id): {"status": "failure"} for task_id in groups}
        finished = []
        for task_id, group in groups.items():
            try:
                made = [] if group is None else self._rows_of(batch, group)
            except Exception as error:
                self._on_error(error)
                continue
            rows += made
            finished += [batch.uid(task_id)] if made else []
        try:
            if rows:
                self._retry(lambda: _put_rows(batch.partition, rows), stop_after_delay(_PATIENCE_S))
            tags |= {uid: {"status": "finished"} for uid in finished}
        except Exception as error:
            self._on_error(error)
        self._retry(lambda: set_tags(batch.partition, tags), stop_never)

    def _retry(self, write: Callable[[], None], stop: StopBaseT) -> None:
        """Retry a write until `stop`, and report a failure that lasts for more than `_PATIENCE_S`."""

        def report(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            log.warning("TransferQueue does not take a write, attempt %d: %r", state.attempt_number, error)
            if error is not None and (state.seconds_since_start or 0.0) > _PATIENCE_S:
                self._on_error(error)

        wait = wait_exponential_jitter(multiplier=0.5, max=30.0)
        Retrying(retry=retry_if_exception_type(Exception), stop=stop, wait=wait, before_sleep=report, reraise=True)(
            write
        )


def _put_rows(partition: str, rows: list[QueueRow]) -> None:
    import transfer_queue as tq

    keys, fields, tags = map(list, zip(*rows, strict=True))
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=verl_api.list_of_dict_to_tensordict(fields), tags=tags)


def set_tags(partition: str, tags: Mapping[str, dict[str, Any]]) -> None:
    """Set fields of the tags of prompts in TransferQueue, by uid. Other fields keep their values."""
    import transfer_queue as tq

    tq.kv_batch_put(keys=[*tags], partition_id=partition, tags=[*tags.values()])


def read_origins() -> dict[str, Origin]:
    """Return the origins of the prompts that verl's checkpoint holds as unfinished, by uid."""
    import transfer_queue as tq

    tags = (tq.kv_list("train") or {}).get("train", {})
    origins = {uid: Origin.read(tag) for uid, tag in tags.items() if tag.get("is_prompt", False)}
    return {uid: origin for uid, origin in origins.items() if origin is not None}


def rows_of_tensordict(prompts: Any) -> Iterator[dict[str, Any]]:
    """Yield each row of verl's batch as a dict of plain values and tensors."""
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
                raise TypeError(
                    f"verl's batch holds {key!r} as a {type(value).__name__}, which this backend cannot read"
                )
        yield row


def is_validation(prompts: Any) -> bool:
    """Return whether verl validates with this batch."""
    return bool(prompts["validate"]) if "validate" in prompts else False


def global_step(prompts: Mapping[str, Any]) -> int:
    """Return verl's global step, which is the same in each row of a batch."""
    return int(next(rows_of_tensordict(prompts))["global_steps"])
