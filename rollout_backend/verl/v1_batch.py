"""A batch of verl's v1 trainer: the prompts read from its TensorDict, and the thread that writes to TransferQueue.

Invariants:

- Each prompt gets exactly one terminal status, after all of its rows.
- The last group of a batch is written only when the batch is over, because verl then takes the servers' memory.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rollout_backend.core.earlier_batches import Origin
from rollout_backend.core.staleness import AbandonedWeights
from rollout_backend.core.tasks import Task
from rollout_backend.results.step_report import GroupResult

Request = tuple[dict[str, Any], Task]  # a row of verl's batch, and its task

_CONTROL_COLUMNS = ("validate", "__rollout_n__", "__do_sample__")  # verl's instructions, not data for the agent


class V1Batch:
    """A batch in flight, or the part of one that resumes an earlier step.

    `prompts` holds verl's columns by task id. `reported` holds the ids of tasks that have a result.
    """

    def __init__(
        self,
        number: int,
        requests: Iterable[Request],
        validates: bool = False,
        abandoned: AbandonedWeights | None = None,
    ) -> None:
        """`number` is the step's. `abandoned` are weights that may have sampled the rollouts that it resumes."""
        self.number = number
        self.validates = validates
        self.abandoned = abandoned
        self.tasks: list[Task] = []
        self.prompts: dict[str, dict[str, Any]] = {}  # in verl's order
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
        for task_id, columns in self.prompts.items():
            origin = Origin(self.number, task_id).as_tag()
            requested = {"global_steps": int(columns["global_steps"])}  # verl counts a prompt that it repeats as new
            set_status(self.uid(task_id), self.partition, "running", **origin, **requested)

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


class QueueWriter:
    """One thread that writes to TransferQueue, in order.

    The thread is a daemon: if TransferQueue ends first, a write blocks for ever and must not keep the process alive.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transfer-queue", daemon=True).start()

    def submit(self, work: Callable[..., None], *args: object) -> None:
        self._work.put(functools.partial(work, *args))

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except Exception as error:
                self._on_error(error)


def set_status(uid: str, partition: str, status: str, **more: object) -> None:
    """Set a prompt's status in TransferQueue, and `more` fields of its tag. Other fields keep their values."""
    import transfer_queue as tq

    tq.kv_put(key=uid, partition_id=partition, tag={"status": status, **more})


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
