"""Write a gateway's journal from a thread, because its disk may be full or stop answering.

Invariants:

- The event loop never waits for the disk. Writes are made in order; the next call of the disk makes all writes that
  arrived during the last one.
- A session whose record cannot be written within `_LIMIT_S` continues without a journal. Before its next answer, its
  name is noted in the machine's memory, so that a later gateway refuses it: the journal has only a part of what it
  sampled.
- If the name cannot be noted, the session must end: `append` and `written` raise OSError.
- A noted name is deleted once all keys of its session have expired. A gateway holds a lock on its names while it
  runs, and deletes the names of killed gateways of the same user when it starts.
"""

import asyncio
import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollout_backend.base.disk import Disk
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.sessions.journal import Record, SessionJournal, Table

# The trainer waits for 30 s for the answer to a control request, and a model call has `timeouts.model_call_s`.
_LIMIT_S = 10.0
# Outlives a process, as the journal does, and needs no disk.
_MEMORY = Path("/dev/shm")  # noqa: S108  a file there is private, and its name cannot be guessed
if not _MEMORY.is_dir():
    _MEMORY = Path(tempfile.gettempdir())
_NOTED = "rollout-backend-noted-"

log = logging.getLogger(__name__)


class _Write(NamedTuple):
    session_ids: Iterable[str]
    make: Callable[[], None]


class JournalWriter:
    """Makes the calls of one journal. `on_lost` is called with the number of sessions that lost their journal."""

    def __init__(self, journal: SessionJournal, on_lost: Callable[[int], None], session_key_s: float) -> None:
        """`session_key_s` is how long a session's key is valid, in seconds.

        Raises:
            ConfigError: the names that an earlier gateway noted cannot be read.
        """
        self._journal = journal
        self._on_lost = on_lost
        self._session_key_s = session_key_s
        self._disk = Disk(
            journal.folder,
            _LIMIT_S,
            "sessions continue without a journal, and end if this gateway restarts",
        )
        self._next: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._noted_path = _MEMORY / f"{_NOTED}{journal.journal_id}"
        self._noted = Table(self._noted_path)
        # The descriptor of that file, which is locked while this process has noted names.
        self._noting: int | None = None
        delete_expired_names(time.time())
        try:
            # Until when a key of each session without a complete journal may be valid, in unix seconds.
            self._lost: dict[str, float] = self._noted.read()
        except OSError as error:
            why = f"{_MEMORY} names the sessions that its journal lacks, and cannot be read: {error.strerror}"
            raise ConfigError(f"the gateway cannot start: {why}") from None
        # Sessions without a complete journal that could not be noted.
        self._unsafe: set[str] = set()

    # --- sessions of earlier processes ------------------------------------------------------------------------

    def is_lost(self, session_id: str) -> bool:
        """Return whether the journal has only a part of this session."""
        return session_id in self._lost

    def is_left(self, session_id: str) -> bool:
        """Return whether an earlier process wrote this session, and `take` was not called for it yet."""
        return self._journal.is_left(session_id)

    def take(self, session_id: str) -> None:
        self._journal.take(session_id)

    async def load(self, session_id: str) -> memoryview:
        """Return the records of a session, for `journal.decode`. Raises OSError, also if the disk does not answer."""
        if self._disk.hangs:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return await self._disk.call(self._journal.load, session_id)

    # --- writes -----------------------------------------------------------------------------------------------

    def append(self, session_id: str, record: Record) -> None:
        """Append a record to a session. Raises OSError if the session must end."""
        self._check(session_id)
        if self._disk.hangs:
            self._lose([session_id])
            self._check(session_id)
        if session_id not in self._lost:
            self._submit([session_id], partial(self._journal.append, session_id, record))

    def close(self, sessions: Mapping[str, float]) -> None:
        """Delete these sessions except for their names, each of which has an expiry time."""
        self._submit(sessions, partial(self._journal.close, sessions))

    def report(self, session_id: str, report: Record) -> None:
        """Replace what was reported of a session."""
        self._submit([session_id], partial(self._journal.report, session_id, report))

    def sweep(self, closed: Mapping[str, float], reports: Mapping[str, Record], now: float) -> None:
        """Delete what has expired: see `SessionJournal.sweep`."""
        if self._disk.hangs:
            return
        self._submit((), partial(self._journal.sweep, dict(closed), dict(reports), now, self._session_key_s))
        if self._lost and max(self._lost.values()) <= now:
            self._noted.delete()
            self._release_names()
            self._lost.clear()

    async def written(self, session_id: str | None = None) -> None:
        """Return once the disk has taken all writes, or the sessions that lost their journal are noted.

        Raises:
            OSError: this session must end.
        """
        if self._writing is not None and not self._writing.done():
            await asyncio.shield(self._writing)
        if session_id is not None:
            self._check(session_id)

    def release(self) -> None:
        """Make the remaining writes, and release the folder for another gateway."""
        if self._next:
            self._disk.submit(_make, self._next)
        self._disk.close()
        if not self._disk.hangs:
            self._journal.release()
        self._release_names()

    def _release_names(self) -> None:
        if self._noting is not None:
            os.close(self._noting)
            self._noting = None

    def _submit(self, session_ids: Iterable[str], make: Callable[[], None]) -> None:
        self._next.append(_Write(session_ids, make))
        if len(self._next) == 1:
            self._writing = asyncio.create_task(self._write(self._writing))

    async def _write(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        writes, self._next = self._next, []
        try:
            lost = await self._disk.call(_make, writes)
        except TimeoutError:
            lost = [each for write in writes for each in write.session_ids]
        self._lose(lost)

    def _lose(self, session_ids: Iterable[str]) -> None:
        until = time.time() + self._session_key_s
        lost = {each: until for each in session_ids if each not in self._lost}
        if not lost:
            return
        try:
            if self._noting is None:
                self._noting = _lock(self._noted_path, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._noted.append(lost)
        except OSError as error:
            log.warning("%d sessions end: neither the journal nor %s can be written: %s", len(lost), _MEMORY, error)
            self._unsafe.update(lost)
            return
        self._lost |= lost
        self._on_lost(len(lost))

    def _check(self, session_id: str) -> None:
        if session_id in self._unsafe:
            raise OSError(errno.EIO, "the session's journal is incomplete")


def delete_expired_names(now: float) -> None:
    """Delete what ended gateways of this user have noted, once their sessions' keys have expired."""
    for path in _MEMORY.glob(_NOTED + "[0-9a-f]" * 16):
        # The lock of a gateway that still runs makes this one fail.
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    noted = Table(path)
                    if all(until <= now for until in noted.read().values()):
                        noted.delete()
                finally:
                    os.close(descriptor)


def _lock(path: Path, operation: int) -> int:
    """Open and lock a file with names until its descriptor is closed. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, operation)
        except OSError:
            os.close(descriptor)
            raise
        # Another process may have deleted the file before it was locked.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _make(writes: Iterable[_Write]) -> list[str]:
    """Make the writes, and return the sessions whose writes failed."""
    lost: list[str] = []
    for write in writes:
        try:
            write.make()
        # After any other error, too, a later gateway must not take the rest of the session for all of it.
        except Exception as error:
            is_ours = not isinstance(error, OSError)
            log.warning("a journal cannot be written, and sessions continue without it: %s", error, exc_info=is_ours)
            lost += write.session_ids
    return lost
