"""Sum what runs are compared by, task by task, so that a run can be read without its records.

Invariant: the size of the totals depends on the number of tasks, not on their rollouts or steps.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from agent_wrapper.contract import Outcome
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.summary import duration

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
"""What runs are compared by: the value of a rollout, and whether higher (1), lower (-1) or neither (0) is better."""


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
        self._totals: dict[str, array[float]] = {}
        for step in steps:
            self.add(step)

    def add(self, step: TaskTotals) -> None:
        """Add the tasks of a step."""
        columns = zip(*step.sums, *step.counts, strict=True)
        for task, payload, values in zip(step.task_ids, step.payloads, columns, strict=True):
            known = self._totals.get(task)
            if known is None:
                self._totals[task] = array("d", values)
            else:
                for place, value in enumerate(values):
                    known[place] += value
            if payload is not None:
                self.payloads[task] = payload

    def means(self, measure: str) -> dict[str, float]:
        """Return the mean of a measure for each task that has a value."""
        place = [*MEASURES].index(measure)
        counted = place + len(MEASURES)
        return {task: each[place] / each[counted] for task, each in self._totals.items() if each[counted]}


def totals_of(records: Sequence[RolloutRecord]) -> RunTotals:
    """Return the totals of records whose tasks' payloads do not matter."""
    return RunTotals([TaskTotals.of(records, {})])


def _digest(payload: Any) -> int:
    text = json.dumps(payload, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=6).digest())
