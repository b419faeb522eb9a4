"""Sum the measures by which runs are compared, per task, so that a run can be read without its records.

Invariant: the size of the totals depends on the number of tasks, not on their rollouts or steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import numpy as np
from pydantic import BaseModel

from agent_wrapper.contract import Outcome
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.summary import duration

REWARD = "reward"
Measure = Callable[[RolloutRecord], float | None]


def _cut(record: RolloutRecord) -> float | None:
    return record.result.cut_replies / record.result.turns if record.result and record.result.turns else None


MEASURES: dict[str, tuple[Measure, int]] = {
    REWARD: (attrgetter("reward"), 1),
    "completed": (lambda each: float(each.outcome is Outcome.COMPLETED), 1),
    "sampled tokens": (lambda each: each.result.sampled_tokens if each.result else None, 0),
    "model calls": (lambda each: each.result.turns if each.result else None, 0),
    "replies cut at max_tokens": (_cut, -1),
    "prefix cache hit": (lambda each: each.result.cache_hit if each.result else None, 1),
    "seconds": (lambda each: duration(each) if each.outcome is Outcome.COMPLETED else None, -1),
}
"""Measures of a rollout for comparisons, and whether higher (1), lower (-1) or neither (0) is better."""


class TaskTotals(BaseModel, frozen=True):
    """The tasks of a step, one entry of each column per task."""

    task_ids: tuple[str, ...]
    payloads: tuple[int | None, ...]
    """Digest of each task's payload; None if it is unknown."""
    sums: tuple[tuple[float, ...], ...]
    """One column per measure, in the order of `MEASURES`."""
    counts: tuple[tuple[int, ...], ...]
    """Number of rollouts with a value; one column per measure."""

    @classmethod
    def of(cls, records: Iterable[RolloutRecord], tasks: Mapping[str, Mapping[str, Any]]) -> TaskTotals:
        """Return the totals of records. `tasks` has the rows of the step's task file by task id."""
        by_task: dict[str, list[RolloutRecord]] = {}
        for record in records:
            by_task.setdefault(record.task_id, []).append(record)
        columns = [
            [[value for each in of_task if (value := measure(each)) is not None] for of_task in by_task.values()]
            for measure, _ in MEASURES.values()
        ]
        return cls(
            task_ids=tuple(by_task),
            payloads=tuple(_digest(tasks[task]["payload"]) if task in tasks else None for task in by_task),
            sums=tuple(tuple(map(sum, column)) for column in columns),
            counts=tuple(tuple(map(len, column)) for column in columns),
        )

    def means(self, measure: str) -> list[float | None]:
        """Return the mean of a measure for each task."""
        place = [*MEASURES].index(measure)
        pairs = zip(self.sums[place], self.counts[place], strict=True)
        return [total / count if count else None for total, count in pairs]


class RunTotals:
    """The tasks of several steps."""

    def __init__(self, steps: Iterable[TaskTotals] = ()) -> None:
        self.payloads: dict[str, int] = {}
        """Digest of each task's payload in the last step that has it, if known."""
        self._places: dict[str, int] = {}
        """The row of each task in the sums and counts."""
        self._totals = np.zeros((0, 2 * len(MEASURES)))
        for step in steps:
            self.add(step)

    def add(self, step: TaskTotals) -> None:
        """Add the tasks of a step."""
        rows = [self._places.setdefault(task, len(self._places)) for task in step.task_ids]
        if (more := len(self._places) - len(self._totals)) > 0:
            # Allocate a reserve, so that a training with new tasks does not copy the arrays in every step.
            more += len(self._totals) // 4
            self._totals = np.concatenate([self._totals, np.zeros((more, self._totals.shape[1]))])
        self._totals[rows] += np.array([*step.sums, *step.counts], dtype=float).T
        known = zip(step.task_ids, step.payloads, strict=True)
        self.payloads.update((task, payload) for task, payload in known if payload is not None)

    def means(self, measure: str) -> dict[str, float]:
        """Return the mean of a measure for each task that has a value."""
        place = [*MEASURES].index(measure)
        sums, counts = self._totals[:, place].tolist(), self._totals[:, place + len(MEASURES)].tolist()
        return {task: sums[row] / counts[row] for task, row in self._places.items() if counts[row]}


def _digest(payload: Any) -> int:
    text = json.dumps(payload, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=6).digest())
