"""A batch of verl's v1 trainer: the prompts read from its TensorDict, and the thread that writes to TransferQueue.

Invariants:

- Each prompt gets exactly one terminal status, after all of its rows.
- The last group of a batch is written only when the batch is over, because verl then takes the servers' memory.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rollout_backend.core.report import GroupResult


class V1Batch:
    """A batch in flight.

    `prompts` holds verl's columns by task id. `reported` holds the ids of tasks that have a result.
    """

    def __init__(self, partition: str) -> None:
        self.partition = partition
        self.prompts: dict[str, dict[str, Any]] = {}
        self.reported: set[str] = set()
        self.last: GroupResult | None = None

    @property
    def validates(self) -> bool:
        return self.partition == "val"

    def uid(self, task_id: str) -> str:
        """Return verl's uid of the prompt."""
        return str(self.prompts[task_id]["uid"])

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


def set_status(uid: str, partition: str, status: str) -> None:
    """Set a prompt's status in TransferQueue."""
    import transfer_queue as tq

    tq.kv_put(key=uid, partition_id=partition, tag={"status": status})


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
