"""Write sessions to files, so that a restarted gateway continues them.

    FOLDER/sessions/NAME      the records of one session
    FOLDER/closed             the names of closed sessions
    FOLDER/reports            what agents of SageMaker's job runtime reported of their sessions: see `reports`
    FOLDER/journal_id, FOLDER/lock, FOLDER/port: see `journal_folder`

A record is a length, a CRC-32, and msgpack:

    {"kind": "asked", ...}        a call has started, or was refused by admission; it has no answer yet
    {"kind": "dropped", ...}      the call was invalid, or its client disconnected, so it needs no answer; and what
                                  its stream sampled before
    {"kind": "answered", ...}     an answered call, with all its choices: its turns, its answer, and the session's
                                  counts after it
    {"kind": "sealed", ...}       the session was sealed: when (unix seconds), which calls were unanswered, and which
                                  replies no client received

Invariants:

- A call is written before it is answered, so the journal has every answer that a client received, except in sessions
  that `journal_writer` has noted. A truncated record belongs to an unanswered call and is dropped.
- A session without a file in the journal that its key names has sampled nothing. A lost or recreated folder is a
  different journal; otherwise a part of a session would count as the whole session.
- Only one process at a time writes to the folder.
- The size is bounded: a session's file is deleted with the session, and its name once all its keys have expired. The
  bytes of an image are stored once.
- Numbers are restored exactly; logprobs as float32, which is the precision of a trajectory. Text of agents and models
  is stored as JSON, because it may not be valid UTF-8.

The journal survives the process, not the machine: it never calls fsync.
"""

import hashlib
import json
import logging
import math
import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from agent_wrapper.contract import ImageSpan, VersionSpan
from rollout_backend.base.atomic_file import write_file
from rollout_backend.core.routed_experts import ExpertRows
from rollout_backend.errors import ConfigError
from rollout_backend.model.dialects.base import to_json
from rollout_backend.model.gateway.sessions.conversations import Continued, RecordedReply, RecordedTurn
from rollout_backend.model.gateway.sessions.journal_folder import OPEN_FILES, lock
from rollout_backend.model.images import Image
from rollout_backend.model.model_call import Answer, Choice
from rollout_backend.model.rendering.segments import Completion, TurnPosition

_HEAD = struct.Struct("<II")
_COMPACT_FROM = 1000
_BUFFER_BYTES = 4096

Record = dict[str, Any]

log = logging.getLogger(__name__)


def read_session(folder: Path, session_id: str) -> list[Record]:
    """Return the complete records of a session, from a folder to which a gateway may be writing."""
    try:
        data = (folder / "sessions" / _name(session_id)).read_bytes()
    except FileNotFoundError:
        return []
    return decode(memoryview(data))


def decode(data: memoryview) -> list[Any]:
    """Return all complete records, in order."""
    return [msgpack.unpackb(body) for body, _ in _complete(data)]


class SessionJournal:
    """A journal in a folder made by `prepare`, held until `release` or the end of the process.

    One thread calls it, except for `is_left` and `take`.
    """

    def __init__(self, folder: Path) -> None:
        """Raise ConfigError if the folder cannot be used, or another gateway holds it."""
        self.folder = folder
        self._sessions = folder / "sessions"
        self._closed_table, self._reports_table = Table(folder / "closed"), Table(folder / "reports")
        # Descriptors, least recently used first.
        self._open: dict[str, int] = {}
        try:
            self._lock = lock(folder, 0.0)
            self.journal_id = (folder / "journal_id").read_text()
            self._left = {entry.name: entry.stat().st_mtime for entry in os.scandir(self._sessions)}
            closed = {name: until for name, until in self._closed_table.read().items() if until > time.time()}
            self.reports: dict[str, Record] = {
                name: report
                for name, report in self._reports_table.read().items()
                if name not in closed and report["until"] > time.time()
            }
            """The reports of open sessions, by name."""
        except OSError as error:
            raise ConfigError(f"the gateway's journal cannot be kept in {folder}: {error.strerror}") from None
        self.closed: Mapping[str, float] = closed
        """Names of closed sessions, each with the time until which it is remembered."""

    def release(self) -> None:
        """Release the folder for another gateway."""
        for name in list(self._open):
            os.close(self._open.pop(name))
        self._lock.close()

    def append(self, session_id: str, record: Record) -> None:
        """Append a record. Raises OSError after restoring the file, if that is possible."""
        name = _name(session_id)
        descriptor = self._open.pop(name, None)
        if descriptor is None:
            descriptor = _open(self._sessions / name)
        self._open[name] = descriptor
        if len(self._open) > OPEN_FILES:
            os.close(self._open.pop(next(iter(self._open))))
        _write(descriptor, _frame(record))

    def is_left(self, session_id: str) -> bool:
        """Return whether an earlier process wrote this session, and `take` was not called for it yet."""
        return _name(session_id) in self._left

    def take(self, session_id: str) -> None:
        """Take a session of an earlier process, which `sweep` then leaves to the registry."""
        self._left.pop(_name(session_id), None)

    def load(self, session_id: str) -> memoryview:
        """Return the records of a session, in order, for `decode`. Raises OSError."""
        return _load(self._file(session_id))

    def close(self, sessions: Mapping[str, float]) -> None:
        """Delete these sessions except for their names, each of which has an expiry time. Raises OSError."""
        try:
            self._closed_table.append(sessions)
        finally:
            # Also on a full disk, which this frees.
            for path in map(self._file, sessions):
                if path.name in self._open:
                    os.close(self._open.pop(path.name))
                path.unlink(missing_ok=True)

    def report(self, session_id: str, report: Record) -> None:
        """Replace what was reported of a session. Raises OSError."""
        self._reports_table.append({session_id: report})

    def sweep(
        self, closed: Mapping[str, float], reports: Mapping[str, Record], now: float, session_key_s: float
    ) -> None:
        """Delete expired names and reports, and sessions of earlier processes whose keys have expired.

        `closed` and `reports` are what to keep; `session_key_s` is the longest validity of a key. Raises OSError.
        """
        for name in [name for name, written_at in [*self._left.items()] if written_at + session_key_s <= now]:
            self._left.pop(name, None)
            (self._sessions / name).unlink(missing_ok=True)
        self._closed_table.compact(closed)
        self._reports_table.compact(reports)

    def _file(self, session_id: str) -> Path:
        return self._sessions / _name(session_id)


# --- files ------------------------------------------------------------------------------------------------


def _name(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()


def _frame(record: object) -> bytes:
    # A buffer of the default size, 256 KiB, would be requested from the system and returned each time.
    body: bytes = msgpack.packb(record, buf_size=_BUFFER_BYTES)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _write(descriptor: int, data: bytes) -> None:
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:] if written else data)
    except OSError:
        # Otherwise later records would follow a truncated one and be lost with it.
        if written:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise


class Table:
    """A file with values of names. The last value of a name counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0

    def read(self) -> dict[str, Any]:
        """Return the values; none if there is no file. Raises OSError."""
        records = decode(_load(self._path))
        self._written = len(records)
        return dict(records)

    def append(self, values: Mapping[str, Any]) -> None:
        """Add or replace values. Raises OSError."""
        file = _open(self._path)
        try:
            _write(file, b"".join(map(_frame, values.items())))
        finally:
            os.close(file)
        self._written += len(values)

    def compact(self, values: Mapping[str, Any]) -> None:
        """Rewrite the file with only these values, once most of its records are outdated."""
        if self._written - len(values) >= max(_COMPACT_FROM, len(values)):
            write_file(self._path, b"".join(map(_frame, values.items())), private=True)
            self._written = len(values)

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)
        self._written = 0


def _load(path: Path) -> memoryview:
    """Return all complete records, after truncating the file behind them. Without a file, there are none."""
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return memoryview(b"")
    end = max((end for _, end in _complete(data)), default=0)
    if end < len(data):
        log.warning("the last %d bytes of %s are no complete record and are dropped", len(data) - end, path.name)
        os.truncate(path, end)
    return data[:end]


def _complete(data: memoryview) -> Iterator[tuple[memoryview, int]]:
    """Yield the bodies of all complete records, each with the offset of its end."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != crc:
            break
        at += _HEAD.size + length
        yield body, at


# --- records ------------------------------------------------------------------------------------------------


def turns(record: Record) -> list[RecordedTurn]:
    """Return the turns that a record adds; none if its call sampled nothing."""
    return [_turn_of(turn) for turn in record.get("turns", ())]


def text_bytes(record: Record) -> int:
    """Return the size of the messages that a record adds."""
    return sum(len(turn["messages"]) for turn in record.get("turns", ()))


def answer_of(record: Record) -> Answer:
    """Return the answer of an answered call."""
    fields = json.loads(record["answer"])
    return Answer(**{**fields, "choices": tuple(Choice(**choice) for choice in fields["choices"])})


def undelivered_of(record: Record) -> list[RecordedReply]:
    """Return the replies that no client had received when the session was sealed."""
    return [RecordedReply(TurnPosition(*place), end) for place, end in record.get("undelivered", ())]


def asked(call: bytes, *, is_retry: bool, first_call_s: float | None) -> Record:
    """Encode the start of a call. `is_retry` means that the request declares itself a retry."""
    return {"kind": "asked", "call": call, "is_retry": is_retry, "first_call_s": first_call_s}


def dropped(call: bytes, turns: Sequence[RecordedTurn] = ()) -> Record:
    return {"kind": "dropped", "call": call, "turns": [_turn(turn) for turn in turns]}


def sealed(at: float, unanswered: Iterable[bytes], undelivered: Iterable[RecordedReply]) -> Record:
    replies = [[list(reply.place), reply.end] for reply in undelivered]
    return {"kind": "sealed", "at": at, "unanswered": list(unanswered), "undelivered": replies}


def answered(
    call: bytes,
    request: bytes,
    turns: Sequence[RecordedTurn],
    answer: Answer,
    started: int,
    sampled_tokens: int,
) -> Record:
    """Encode an answered call. `request` is the request's digest; `started` and the token count are the session's
    totals after this call."""
    return {
        "kind": "answered",
        "call": call,
        "request": request,
        "turns": [_turn(turn) for turn in turns],
        "answer": to_json({**vars(answer), "choices": [vars(choice) for choice in answer.choices]}),
        "started": started,
        "sampled_tokens": sampled_tokens,
    }


def _turn(turn: RecordedTurn) -> Record:
    completion = turn.completion
    logprobs = [math.nan if logprob is None else logprob for logprob in completion.logprobs]
    seen: Record = {"spans": [vars(span) for span in turn.spans]} if turn.spans else {}
    if turn.images:
        seen["images"] = [vars(image) for image in turn.images]
    if completion.experts is not None:
        seen["experts"] = list(completion.experts)
    if turn.continued is not None:
        seen["continued"] = [*turn.continued[:2], to_json(turn.continued.message), turn.continued.end]
    return seen | {
        "extends": turn.extends,
        "given": array("i", turn.given).tobytes(),
        "sampled": array("i", completion.token_ids).tobytes(),
        "logprobs": array("f", logprobs).tobytes(),
        "versions": [[span.version, span.start, span.end] for span in completion.weight_versions],
        "finish_reason": completion.finish_reason,
        "matched": completion.matched,
        "cached_tokens": completion.cached_tokens,
        "seconds": completion.seconds,
        "kept": turn.kept,
        "messages": to_json(turn.messages),
        "split_reason": turn.split_reason,
        "tools": turn.tools_digest,
        "asked": turn.asked,
        "end": turn.end,
        "seen": list(turn.seen),
        "is_closed": turn.is_closed,
        "left_out": turn.left_out,
    }


def _turn_of(record: Record) -> RecordedTurn:
    return RecordedTurn(
        extends=record["extends"],
        given=array("i", record["given"]).tolist(),
        completion=Completion(
            token_ids=tuple(array("i", record["sampled"])),
            logprobs=tuple(array("f", record["logprobs"])),
            weight_versions=tuple(
                VersionSpan(version=version, start=start, end=end) for version, start, end in record["versions"]
            ),
            finish_reason=record["finish_reason"],
            matched=record["matched"],
            cached_tokens=record["cached_tokens"],
            seconds=record["seconds"],
            experts=ExpertRows(*record["experts"]) if "experts" in record else None,
        ),
        kept=record["kept"],
        messages=json.loads(record["messages"]),
        split_reason=record["split_reason"],
        tools_digest=record["tools"],
        asked=record["asked"],
        end=record["end"],
        seen=record["seen"],
        spans=[ImageSpan(**span) for span in record.get("spans", ())],
        images=[Image(**image) for image in record.get("images", ())],
        continued=_continued_of(record["continued"]) if "continued" in record else None,
        is_closed=record["is_closed"],
        left_out=record["left_out"],
    )


def _continued_of(record: Sequence[Any]) -> Continued:
    reply, tokens, message, end = record
    return Continued(reply, tokens, json.loads(message), end)
