"""What a gateway's sessions have sampled, in files: whoever goes on with its folder goes on with its sessions.

    FOLDER/epoch              names this journal: a key is good for the journal that its session was begun in
    FOLDER/sessions/NAME      a session: what was asked, answered and recorded in it, and its seal
    FOLDER/closed             the sessions that keep nothing but their names
    FOLDER/lock               held by the one gateway that may write here
    FOLDER/port               where it listened last

What must always hold:

- A call is written before it is answered. So whatever a client was told is here, and a record that was cut off in the
  middle is of a call that nobody was told of: it is dropped.
- A session without a file has sampled nothing, in the journal that its key names. A folder that is lost, or made
  anew, is another journal: the rest of a session would pass for the whole of it.
- One process at a time writes here.
- What is kept is bounded: a session's file goes with the session, and its name once no key of it can be valid.

This outlives processes, not machines: nothing is forced to the disk. A record is its length, its CRC-32, and msgpack.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from rollout_backend.errors import ConfigError
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.records import Record
from rollout_backend.gateway.tokens import SessionClaims

_PARTS = ("sessions", "closed", "epoch")
_HEAD = struct.Struct("<II")
_WAIT_S = 15.0  # for the gateway before us to end, which has a moment for its last answers
OPEN_FILES = 512
_COMPACT_FROM = 1000  # names that have expired

log = logging.getLogger(__name__)


def refuse_lost(claims: SessionClaims, epoch: str) -> None:
    """Raises ApiError (410) for a session that was begun in another journal: its earlier turns are not here."""
    if claims.epoch != epoch:
        raise ApiError(
            410,
            "what this session has sampled is lost: the gateway that held it is gone, with its journal. The rollout "
            "is run again",
            code="session_lost",
        )


def prepare(folder: Path, wait_s: float = _WAIT_S) -> str:
    """Makes the folder where there is none, waits until no gateway writes to it any more, and tells its epoch.

    Raises:
        ConfigError: it cannot be used, others may look into it, or a gateway is still at work in it.
    """
    try:
        for each in (folder.parent, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(folder, wait_s):
            if not all((folder / each).exists() for each in _PARTS):  # not yet; or some of it is gone, and so all is
                (folder / "sessions").mkdir(exist_ok=True, mode=0o700)
                _create(folder / "closed", "")
                _create(folder / "epoch", secrets.token_hex(8))
            return (folder / "epoch").read_text()
    except OSError as error:
        raise ConfigError(f"the gateway's journal cannot be kept in {folder}: {error.strerror}") from None


def last_port(folder: Path) -> int:
    """Where the folder's gateway listened last; 0 if that is not known."""
    try:
        return int((folder / "port").read_text())
    except (OSError, ValueError):
        return 0


def keep_port(folder: Path, port: int) -> None:
    _create(folder / "port", str(port))


class Journal:
    """A folder that `prepare` has made, held until `release` or this process's end. Not for several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: the folder cannot be used, or another gateway holds it."""
        self._sessions = folder / "sessions"
        self._closed_file = folder / "closed"
        self._open: dict[str, int] = {}  # descriptors; at each call to the system another thread may cut in
        try:
            self._lock = _lock(folder, 0.0)
            self.epoch = (folder / "epoch").read_text()
            self._left = {entry.name: entry.stat().st_mtime for entry in os.scandir(self._sessions)}
            closed = {name: until for name, until in _records(self._closed_file) if until > time.time()}
            self._write_closed(closed)
        except OSError as error:
            raise ConfigError(f"the gateway's journal cannot be kept in {folder}: {error.strerror}") from None
        self.closed: Mapping[str, float] = closed
        """The names of sessions that keep nothing else, and until when they must be remembered."""

    def release(self) -> None:
        """For the next one."""
        for name in list(self._open):
            os.close(self._open.pop(name))
        self._lock.close()

    def append(self, session_id: str, record: Record) -> None:
        """Raises OSError; then the file is as it was, as far as that can be."""
        path = self._file(session_id)
        descriptor = self._open.pop(path.name, None)
        if descriptor is None:
            descriptor = _open(path)
        self._open[path.name] = descriptor  # the latest at the end
        if len(self._open) > OPEN_FILES:
            os.close(self._open.pop(next(iter(self._open))))
        _write(descriptor, _frame(record))

    def read(self, session_id: str) -> list[Record]:
        """Whatever was written of a session, in order. The session is in the registry's hands from now on."""
        path = self._file(session_id)
        self._left.pop(path.name, None)
        return list(_records(path))

    def close(self, sessions: Mapping[str, float]) -> None:
        """Keeps of these sessions their names, until when, and nothing else. Raises OSError."""
        closed = _open(self._closed_file)
        try:
            _write(closed, b"".join(map(_frame, sessions.items())))
        finally:
            os.close(closed)
        self._written += len(sessions)
        for path in map(self._file, sessions):
            if path.name in self._open:
                os.close(self._open.pop(path.name))
            path.unlink(missing_ok=True)

    def sweep(self, closed: Mapping[str, float], now: float, token_s: float) -> None:
        """Lets go of what was left by earlier lives and never asked for again, and of names that have expired.

        `closed`: what must be remembered at the moment; `token_s`: the longest life of a key. Raises OSError.
        """
        for name in [name for name, written_at in self._left.items() if written_at + token_s <= now]:
            del self._left[name]
            (self._sessions / name).unlink(missing_ok=True)
        if self._written - len(closed) >= max(_COMPACT_FROM, len(closed)):
            self._write_closed(closed)

    def _write_closed(self, closed: Mapping[str, float]) -> None:
        _create(self._closed_file, b"".join(map(_frame, closed.items())))
        self._written = len(closed)

    def _file(self, session_id: str) -> Path:
        return self._sessions / hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()


# --- files ------------------------------------------------------------------------------------------------


def _frame(record: object) -> bytes:
    body: bytes = msgpack.packb(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _write(descriptor: int, data: bytes) -> None:
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:] if written else data)
    except OSError:
        if written:  # or what follows would stand behind half a record, and be lost with it
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise


def _records(path: Path) -> Iterator[Any]:
    """All whole records. What is behind them is cut off, for more to follow."""
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return
    at = 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != crc:
            break
        at += _HEAD.size + length
        yield msgpack.unpackb(body)
    if at < len(data):
        log.warning("the last %d bytes of %s are no whole record, and are dropped", len(data) - at, path.name)
        os.truncate(path, at)


def _create(path: Path, content: str | bytes) -> None:
    """Whole or not at all, in the place of what was there."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


def _lock(folder: Path, wait_s: float) -> Any:
    """The folder's lock, held as long as the file is open.

    Raises:
        ConfigError: somebody else holds it, or the folder is not this user's alone.
    """
    found = folder.stat()
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(f"others may look into the gateway's journal {folder}: chmod 700 it, or delete it")
    file = os.fdopen(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb")
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                raise ConfigError(
                    f"another gateway is at work in {folder}: is this run under way elsewhere? Give it another run_id"
                ) from None
            time.sleep(0.05)
        else:
            return file
