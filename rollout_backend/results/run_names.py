"""The ids of a run's tasks and rollouts, and which of them a name means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from pydantic_core import from_json

from rollout_backend.core.tasks import read_rows
from rollout_backend.errors import TaskFileError
from rollout_backend.results.archive import RunArchive


@dataclass(frozen=True)
class RunNames:
    """The tasks and the rollouts of some steps, each once, in order."""

    tasks: tuple[str, ...]
    rollouts: tuple[str, ...]

    @classmethod
    def read(cls, archive: RunArchive, steps: Iterable[int]) -> Self:
        """Read the ids of these steps. A step that was killed has no records, so its tasks and results are read.

        Raises:
            ValueError: a record is damaged.
        """
        tasks: dict[str, None] = {}
        rollouts: dict[str, None] = {}
        for step in steps:
            lines = archive.record_lines(step)
            for line in lines:
                record = from_json(line)
                tasks[record["task_id"]] = rollouts[record["rollout_id"]] = None
            if not lines:
                tasks |= dict.fromkeys(_planned_tasks(archive, step))
                rollouts |= dict.fromkeys(path.name for path in archive.results(step))
        return cls(tuple(tasks), tuple(rollouts))

    def starting_with(self, prefix: str) -> tuple[str, ...]:
        """Return the tasks whose ids start with the prefix or, if there are none, the rollouts."""
        for names in (self.tasks, self.rollouts):
            if found := tuple(name for name in names if name.startswith(prefix)):
                return found
        return ()

    def nearest(self, wanted: str) -> str | None:
        """Return the most similar id; None if all differ too much."""
        return next(iter(difflib.get_close_matches(wanted, [*self.tasks, *self.rollouts], 1)), None)


def _planned_tasks(archive: RunArchive, step: int) -> list[str]:
    try:
        rows = [row for _, row in read_rows(archive.tasks_file(step))]
    except TaskFileError:
        return []
    return [str(row["task_id"]) for row in rows if isinstance(row, dict) and "task_id" in row]


def payload_of(archive: RunArchive, step: int, task_id: str) -> object:
    """Return the payload of a task as the step's task file has it; None if it has none."""
    try:
        rows = [row for _, row in read_rows(archive.tasks_file(step))]
    except TaskFileError:
        return None
    return next((row.get("payload") for row in rows if isinstance(row, dict) and row.get("task_id") == task_id), None)
