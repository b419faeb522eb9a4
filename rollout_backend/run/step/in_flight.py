"""Record the sessions of a run's steps in the run's folder, so that a restarted trainer can resume them.

Invariants:

- a session is recorded as invoked before its first invoke, and as stopped only after its stop succeeded. So a planned
  session without a record was never opened, and a session that is recorded but not stopped may be open;
- a session is recorded as running after its agent has accepted the rollout, and as closed before its stop is sent.
  So a session that is running and not closed still runs, has published a result, or died;
- if a record cannot be written, the step's records are deleted and its manifest says that they are incomplete: every
  session in the manifest then counts as open;
- a disk that does not answer delays a step by the limit of `base.disk`, once.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_backend.base.disk import Disk

# The janitor appends to files with this suffix when it stops the sessions of a dead run.
SUFFIX = ".in-flight"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


class InFlightAttempt(BaseModel):
    """An agent that accepted its rollout. Times in unix seconds; no result can arrive after `deadline`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: str
    rollout_id: str
    attempt: int
    began: float
    deadline: float


class _Execution(BaseModel):
    """One execution of a step, which records each session of these attempts before its invoke.

    `boot` identifies the machine's boot: records survive the process but are not flushed to disk, so a crashed
    machine may have lost the last ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonce: str
    boot: str
    first: int
    last: int


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    execution: _Execution | None = None
    invoked: str | None = None
    running: InFlightAttempt | None = None
    closed: str | None = None
    stopped: str | None = None

    @classmethod
    def read(cls, text: str) -> Self | None:
        try:
            return cls.model_validate_json(text)
        # A writer that is killed leaves a truncated line.
        except ValidationError:
            return None


@dataclass(frozen=True)
class OpenSessions:
    """The sessions of earlier executions that were invoked and are not known to be stopped."""

    session_ids: list[str] = field(default_factory=list)
    complete_attempts: frozenset[int] = frozenset()
    """Attempt numbers whose invoked sessions are all recorded."""


class StepLines(Protocol):
    """Lines of text for each step that outlive this process. The methods end in time."""

    async def append(self, step: int, lines: str) -> None:
        """Raises OSError."""
        ...

    async def read(self, step: int) -> Iterable[str]: ...

    async def delete(self, step: int) -> None:
        """Raises OSError."""
        ...


class StepFiles:
    """One file per step, in a folder. A disk that does not answer counts as one that refuses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._disk = Disk(folder)

    async def append(self, step: int, lines: str) -> None:
        # The line break comes first, because the last line may be truncated if its writer was killed.
        await self._disk.call(_append, self._path(step), f"\n{lines}".encode())

    async def read(self, step: int) -> list[str]:
        try:
            return (await self._disk.call(self._path(step).read_text, errors="replace")).split("\n")
        # Without records, every session that the manifest names counts as open.
        except OSError:
            return []

    async def delete(self, step: int) -> None:
        await self._disk.call(self._path(step).unlink, missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:08d}{SUFFIX}"


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class InFlightLog:
    """The records of a run."""

    def __init__(self, lines: StepLines) -> None:
        self._lines = lines
        # By step: the lines that the next write takes, and the last write.
        self._unwritten: dict[int, list[str]] = {}
        self._writes: dict[int, asyncio.Task[None]] = {}
        # Steps whose records could not be written.
        self._silent: set[int] = set()
        self._boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""

    async def record_execution(self, step: int, nonce: str, first: int, last: int) -> None:
        """Record that an execution of the step starts and may make these attempts."""
        await self._record(step, _Line(execution=_Execution(nonce=nonce, boot=self._boot, first=first, last=last)))

    async def record_invoked(self, step: int, session_id: str) -> None:
        """Record a session before its first invoke."""
        await self._record(step, _Line(invoked=session_id))

    def withdraw(self, step: int, session_id: str) -> None:
        """Record, without waiting, that a session will not be invoked after all."""
        self._submit(step, _Line(stopped=session_id))

    async def record_stopped(self, step: int, session_id: str) -> None:
        """Record that a session's stop has succeeded."""
        await self._record(step, _Line(stopped=session_id))

    async def open_sessions(self, step: int, nonce: str) -> OpenSessions:
        """Return the recorded sessions of the step with this nonce that may be open."""
        session_ids: dict[str, None] = {}
        complete_attempts: set[int] = set()
        for line in await self._read(step):
            if line.execution is not None and (line.execution.nonce, line.execution.boot) == (nonce, self._boot):
                complete_attempts.update(range(line.execution.first, line.execution.last + 1))
            if line.invoked is not None:
                session_ids[line.invoked] = None
            if line.running is not None:
                session_ids[line.running.session_id] = None
            if line.stopped is not None:
                session_ids.pop(line.stopped, None)
        return OpenSessions(list(session_ids), frozenset(complete_attempts))

    async def record_running(self, step: int, attempt: InFlightAttempt) -> None:
        """Record that an agent has accepted its rollout."""
        await self._record(step, _Line(running=attempt))

    async def record_closed(self, step: int, session_id: str) -> None:
        """Record that a session is being closed, before its stop is sent."""
        await self._record(step, _Line(closed=session_id))

    async def running_attempts(self, step: int) -> list[InFlightAttempt]:
        """Return the running attempts recorded by this trainer or earlier ones, in order."""
        found: dict[str, InFlightAttempt] = {}
        for line in await self._read(step):
            if line.running is not None:
                found[line.running.session_id] = line.running
            elif line.closed is not None:
                found.pop(line.closed, None)
        return list(found.values())

    async def _read(self, step: int) -> Iterable[_Line]:
        return filter(None, map(_Line.read, await self._lines.read(step)))

    def is_complete(self, step: int) -> bool:
        """Return False if records of the step could not be written."""
        return step not in self._silent

    async def delete(self, step: int) -> None:
        """Delete the records of a step, because its sessions are all closed or the records cannot be written."""
        self._writes.pop(step, None)
        try:
            await self._lines.delete(step)
        # A restarted trainer closes these sessions again.
        except OSError as error:
            log.warning("in-flight records cannot be deleted: %s", error)

    async def _record(self, step: int, line: _Line) -> None:
        """Return once the line is written, or the disk has refused it."""
        if (write := self._submit(step, line)) is not None:
            await asyncio.shield(write)

    def _submit(self, step: int, line: _Line) -> asyncio.Task[None] | None:
        """Queue the line for the next write, and return that write. Return None if records of the step could not be
        written."""
        if step in self._silent:
            return None
        lines = self._unwritten.setdefault(step, [])
        lines.append(line.model_dump_json(exclude_none=True))
        # The lines that arrive during a write are written together.
        if len(lines) == 1:
            self._writes[step] = asyncio.create_task(self._write(step, self._writes.get(step)))
        return self._writes[step]

    async def _write(self, step: int, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        lines = self._unwritten.pop(step)
        if step in self._silent:
            return
        try:
            await self._lines.append(step, "\n".join(lines))
        except OSError as error:
            log.warning(
                "running agents cannot be recorded (%s): a restarted trainer would dispatch their rollouts again",
                error,
            )
            self._silent.add(step)
            await self.delete(step)
