"""Which agents are at work, noted in the run's folder, for a trainer that is started again while they are.

What must always hold: a session is noted once its agent has accepted the rollout, and noted as closed before it is
told to stop. So one that is noted, and not as closed, is at work, has published, or died by itself. A note that is
missing costs no more than running a rollout again, and where notes cannot be written there are none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

SUFFIX = ".dispatched"  # the janitor deletes what ends so, before it stops the sessions of a dead run

log = logging.getLogger(__name__)


class Note(BaseModel):
    """An agent that has accepted its rollout. Unix seconds; nothing can come of it after its `deadline`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: str
    rollout_id: str
    attempt: int
    began: float
    deadline: float


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    running: Note | None = None
    closed: str | None = None

    @classmethod
    def read(cls, text: str) -> Self | None:
        try:
            return cls.model_validate_json(text)
        except ValidationError:  # cut off in the middle, by the writer's death
            return None


class Dispatched:
    """Notes of a run's steps, a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._silent: set[int] = set()  # steps whose notes could not be written

    def running(self, step: int, note: Note) -> None:
        self._write(step, _Line(running=note))

    def closed(self, step: int, session_id: str) -> None:
        self._write(step, _Line(closed=session_id))

    def at_work(self, step: int) -> list[Note]:
        """What was noted and not closed, by this trainer or those before it; in order."""
        found: dict[str, Note] = {}
        for line in map(_Line.read, self._lines(step)):
            if line is not None and line.running is not None:
                found[line.running.session_id] = line.running
            elif line is not None and line.closed is not None:
                found.pop(line.closed, None)
        return list(found.values())

    def over(self, step: int) -> None:
        """All of the step's sessions are closed."""
        self._forget(step)

    def _write(self, step: int, line: _Line) -> None:
        if step in self._silent:
            return
        try:
            self._append(step, f"\n{line.model_dump_json(exclude_none=True)}")
        except OSError as error:
            log.warning("agents at work cannot be noted (%s): a trainer started again would run them anew", error)
            self._silent.add(step)
            self._forget(step)

    # --- where they stand ---------------------------------------------------------------------------------

    def _append(self, step: int, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._path(step).open("a") as file:
            file.write(text)

    def _lines(self, step: int) -> list[str]:
        try:
            return self._path(step).read_text(errors="replace").split("\n")
        except FileNotFoundError:
            return []

    def _forget(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:08d}{SUFFIX}"
