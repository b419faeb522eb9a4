"""Keep the sessions of one gateway. The first call opens a session, it closes once, and ends with its key.

Invariants:

- An open session becomes sealed or revoked and never reopens; later calls get status 410.
- The trajectory has what was recorded when the session was sealed. Every request gets the same bytes. It excludes
  replies that no client received completely and no later call continues.
- Only the name is kept of a revoked session, and of a sealed session `_FETCHABLE_S` after its seal.
- With a journal, sessions survive the process: the first call restores a session. A session whose journal cannot be
  written continues, and ends with the process: see `journal_writer`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agent_wrapper.contract import ContractError, Trajectory
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES, unpacked_size
from rollout_backend.base.logs import report_failure
from rollout_backend.config import ExpertShape
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.dialects.base import RequestMemo
from rollout_backend.model.gateway.cpu_shares import CpuShares
from rollout_backend.model.gateway.session_share import SessionShare
from rollout_backend.model.gateway.sessions import journal as journals
from rollout_backend.model.gateway.sessions.calls import MAX_ANSWERS, RequestKey, RetryCache
from rollout_backend.model.gateway.sessions.conversations import Conversations, RecordedReply
from rollout_backend.model.gateway.sessions.journal import Record, SessionJournal
from rollout_backend.model.gateway.sessions.journal_writer import JournalWriter
from rollout_backend.model.gateway.stats import GatewayStats, count
from rollout_backend.model.model_call import (
    Answer,
    journal_unreadable,
    journal_unwritable,
    session_closed,
    session_lost,
    trajectory_too_large,
)
from rollout_backend.model.rendering.guarded_renderer import RendererBundle

_FETCH_PAUSE_S = 0.25
# Seconds after the seal. Once a restarted gateway is back, the wrapper retries for 30 s.
_FETCHABLE_S = 600.0
_MAX_HEARD = 100_000
# Calls of one session. They take 2 MB of its journal, and as much memory.
MAX_UNANSWERED = 20_000
_WITHOUT_ANSWER = {"asked": 1, "dropped": 1, "answered": -1}
_TOO_MANY = b""
# Smaller trajectories are below any limit.
_READ_FROM_BYTES = 100_000

log = logging.getLogger(__name__)


@dataclass
class OpenSession:
    """One session that is not sealed or revoked yet, and its calls in flight, which may outlive that."""

    claims: SessionClaims
    """The claims of its first key."""
    conversations: Conversations
    # Choices started so far, and tokens of answered calls.
    started: int = 0
    sampled_tokens: int = 0
    text_bytes: int = 0
    """Size of their messages, in memory and in the journal. No template has to render all of them."""
    retries: RetryCache = field(default_factory=RetryCache)
    requests: RequestMemo = field(default_factory=RequestMemo)
    share: SessionShare = field(default_factory=SessionShare)
    unanswered: set[bytes] = field(default_factory=set)
    lost_constrained: bool = False
    expires_at: float = 0.0
    journal: Callable[[OpenSession, Record], None] | None = None
    is_open: bool = True
    age_s: Callable[[], float] = float
    """Returns the seconds since the session's invoke."""
    first_call_s: float | None = None
    """Its age at its first model call."""
    _without_answer: int = 0
    _lost_count: bool = False

    def ask(self, question: bytes, *, is_retry: bool) -> None:
        """Record the start of a model call. Raises ApiError like `write`."""
        if self.first_call_s is None:
            self.first_call_s = self.age_s()
        self.write(journals.asked(question, is_retry=is_retry, first_call_s=self.first_call_s))

    def write(self, record: Record) -> None:
        """Append a record to the journal, if there is one and the session is open. `SessionRegistry.written` waits
        for it.

        The journal keeps a limited number of calls without an answer. A session that has more was refused for hours,
        or is hostile; if the gateway restarts, it counts as one with a lost call.

        Raises:
            ApiError: status 503 if the session's journal is incomplete and that cannot be noted; this also closes the
                session.
        """
        if self.journal is None or not self.is_open:
            return
        change = _WITHOUT_ANSWER.get(record.get("kind", ""), 0)
        self._without_answer += change
        if change > 0 and self._without_answer > MAX_UNANSWERED:
            if self._lost_count:
                return
            self._lost_count = True
            record = journals.asked(_TOO_MANY, is_retry=False, first_call_s=self.first_call_s)
        self.journal(self, record)

    def lose(self, question: bytes) -> None:
        """Count a call that failed on our side as unanswered, until it is repeated or there are too many."""
        if question not in self.unanswered:
            self.unanswered.add(question if len(self.unanswered) < MAX_UNANSWERED else _TOO_MANY)

    @property
    def tasks(self) -> list[asyncio.Future[Answer]]:
        """The tasks of its calls in flight, and some that have ended."""
        return [running.task for running in self.retries.undelivered]

    def close(self) -> None:
        """Abort the calls in flight. None of them records or journals anything afterwards."""
        self.is_open = False
        for task in self.tasks:
            task.cancel()


@dataclass
class _SealedSession:
    trajectory: asyncio.Task[bytes]
    at: float
    expires_at: float
    share: SessionShare
    """Separate from the share of its calls, which may still be ending."""
    next_fetch: float = -math.inf

    def close(self) -> None:
        self.trajectory.cancel()


class SessionRegistry:
    """The sessions of one gateway, by id."""

    def __init__(
        self,
        bundle: RendererBundle,
        model_name: str,
        session_key_s: float,
        clock: Callable[[], float] = time.time,
        sealer: Sealer | None = None,
        journal: SessionJournal | None = None,
        experts: ExpertShape | None = None,
        max_result_bytes: int = MAX_OBJECT_BYTES,
        stats: GatewayStats | None = None,
        max_session_calls: int = 64,
    ) -> None:
        """Without a `sealer`, trajectories carry no seal; without a `journal`, sessions end with this process, and
        otherwise `close` releases it. `experts` is the shape of the routing to record. A trajectory larger than
        `max_result_bytes` is not returned, because the trainer would refuse it.
        """
        self._stats = stats or GatewayStats()
        self._max_session_calls = max_session_calls
        self.cpu = CpuShares(lambda: len(self._sessions))
        self._revoked: set[str] = set()
        self._max_result_bytes = max_result_bytes
        self._experts = experts
        self._bundle = bundle
        self._model_name = model_name
        self._token_s = session_key_s
        self._clock = clock
        self._sealer = sealer
        self._sessions: dict[str, OpenSession | _SealedSession] = {}
        # Shares of sessions that are not open, while they owe for requests.
        self._shares: dict[str, SessionShare] = {}
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._journal: JournalWriter | None = None
        if journal is not None:
            self._journal = JournalWriter(journal, self._count_unjournaled, session_key_s)
        # Sessions that sent heartbeats or calls since the last call of `take_heartbeats`.
        self._beats: set[str] = set()
        self._calls: set[str] = set()
        self._closed = dict(journal.closed) if journal is not None else {}
        # What agents of SageMaker's job runtime reported, by session.
        self.reports: dict[str, Record] = dict(journal.reports) if journal is not None else {}

    @property
    def _open(self) -> list[OpenSession]:
        return [session for session in self._sessions.values() if isinstance(session, OpenSession)]

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def largest(self) -> dict[str, int]:
        """Return the rollout whose open session sampled the most tokens, with their number."""
        largest = max(self._open, key=lambda session: session.sampled_tokens, default=None)
        return {largest.claims.rollout_id: largest.sampled_tokens} if largest is not None else {}

    @property
    def closed_count(self) -> int:
        return len(self._sessions) - self.open_count + len(self._closed)

    def record_heartbeat(self, claims: SessionClaims) -> bool:
        """Record a heartbeat of the session's container. Return whether it is the first since the trainer asked.

        Raises:
            ApiError: status 410 if the session was revoked, so the container may stop.
        """
        self.check_not_revoked(claims.session_id)
        is_first = claims.session_id not in self._beats
        self._beats.add(claims.session_id)
        return is_first

    async def report(self, claims: SessionClaims, **fields: Any) -> None:
        """Record what the session's agent reports of it: see `job_runtime`.

        Raises:
            ApiError: status 410 if the session was revoked; 503 like `written`.
        """
        name = claims.session_id
        self.check_not_revoked(name)
        self.reports[name] = {**self.reports.get(name, {"at": self._clock()}), **fields, "until": claims.expires_at}
        if self._journal is not None:
            self._journal.report(name, self.reports[name])
            await self.written(claims)

    async def written(self, claims: SessionClaims) -> None:
        """Wait until the journal has all records of the session, or a later process will know that it has not.

        Raises:
            ApiError: status 503 if neither is possible; this also closes the session.
        """
        if self._journal is not None and claims.is_recorded:
            try:
                await self._journal.written(claims.session_id)
            except OSError:
                self._close_all({claims.session_id: claims.expires_at})
                raise journal_unwritable() from None

    def check_not_revoked(self, name: str) -> None:
        """Raise ApiError (410) if the session was revoked, or sealed long ago."""
        if name in self._closed:
            if name in self._revoked:
                count(self._stats.after_stop, [name])
            raise session_closed("revoked, or sealed long ago")

    def take_heartbeats(self) -> HeartbeatReport:
        """Return the sessions that sent a heartbeat or call since the last request."""
        heard = HeartbeatReport(frozenset(self._beats), frozenset(self._calls))
        self._beats.clear()
        self._calls.clear()
        return heard

    async def open(self, claims: SessionClaims) -> OpenSession:
        """Return the session of a key. The first call creates the session or restores it from the journal.

        Raises:
            ApiError: status 410 if it is closed, 503 if its journal cannot be read now.
        """
        if claims.session_id in self.reports:
            raise session_closed("its agent has completed the rollout")
        if not claims.is_recorded:
            return OpenSession(claims, Conversations(self._bundle, self._experts), share=self._new_share())
        await self._restore(claims)
        return self._find_open(claims)

    def check_open(self, session: OpenSession) -> None:
        """Raise ApiError (410) if the session was closed in the meantime."""
        if session.is_open:
            return
        name = session.claims.session_id
        if name in self._sessions or name in self._closed:
            self._find_open(session.claims)
        raise session_closed("its key has expired")

    async def seal(self, claims: SessionClaims) -> bytes:
        """Close the session, abort its calls in flight, and return its encoded trajectory.

        Raises:
            ApiError: status 410 if the session was revoked; 413 if the trajectory is too large; 503 if its journal
                cannot be read now, or like `written`.
        """
        await self._restore(claims)
        session = self._find(claims)
        if isinstance(session, OpenSession):
            now = self._clock()
            replies = [reply for running in session.retries.undelivered for reply in running.replies]
            session.write(journals.sealed(now, session.unanswered, replies))
            session = self._seal(session, now, replies)
        await self.written(claims)
        try:
            return await asyncio.shield(session.trajectory)
        except asyncio.CancelledError:
            if session.trajectory.cancelled():
                raise session_closed("revoked") from None
            raise

    async def wait_turn(self, claims: SessionClaims) -> None:
        """Pace trajectory fetches. A client that repeats them without a pause would starve other sessions."""
        session, now = self._find(claims), asyncio.get_running_loop().time()
        if isinstance(session, _SealedSession):
            turn = max(now, session.next_fetch)
            session.next_fetch = turn + _FETCH_PAUSE_S
            await asyncio.sleep(turn - now)

    def share(self, claims: SessionClaims) -> SessionShare:
        """Return the share of this process that a session uses, also before its first call and after its end."""
        name = claims.session_id
        if (session := self._sessions.get(name)) is not None:
            return session.share
        return self._shares.setdefault(name, self._new_share())

    def _new_share(self) -> SessionShare:
        return SessionShare(self.cpu, self._max_session_calls)

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Close these sessions, even if they have made no call yet, abort their calls and free their memory."""
        session_ids = list(session_ids)
        until = self._clock() + self._token_s
        self._revoked.update(session_ids)
        await asyncio.gather(*self._close_all(dict.fromkeys(session_ids, until)), return_exceptions=True)
        if self._journal is not None:
            await self._journal.written()

    async def sweep(self) -> None:
        """Remove sessions whose keys have expired, and the contents of sessions that were sealed long ago."""
        now = self._clock()
        over = {
            name: session.expires_at
            for name, session in self._sessions.items()
            if session.expires_at <= now or (isinstance(session, _SealedSession) and session.at + _FETCHABLE_S <= now)
        }
        calls = self._close_all(over)
        self._closed = {name: until for name, until in self._closed.items() if until > now}
        self._revoked &= self._closed.keys()
        self._shares = {name: share for name, share in self._shares.items() if share.cpu.used_s}
        self.reports = {name: report for name, report in self.reports.items() if report["until"] > now}
        # Without a trainer that polls, these sets only grow.
        if len(self._calls) > _MAX_HEARD:
            self.take_heartbeats()
        if self._journal is not None:
            self._journal.sweep(self._closed, self.reports, now)
        await asyncio.gather(*calls, return_exceptions=True)

    def close(self) -> None:
        """End the threads, and release the journal."""
        self.cpu.close()
        if self._journal is not None:
            self._journal.release()

    def _count_unjournaled(self, sessions: int) -> None:
        self._stats.unjournaled += sessions

    def _find(self, claims: SessionClaims) -> OpenSession | _SealedSession:
        name = claims.session_id
        if name in self._closed:
            self._closed[name] = max(self._closed[name], claims.expires_at)
        self.check_not_revoked(name)
        self._calls.add(name)
        found = self._sessions.get(name)
        if found is None:
            if self._journal is not None and self._journal.is_lost(name):
                raise session_lost()
            found = self._sessions[name] = self._new_session(claims)
        found.expires_at = max(found.expires_at, claims.expires_at)
        return found

    def _find_open(self, claims: SessionClaims) -> OpenSession:
        session = self._find(claims)
        if isinstance(session, _SealedSession):
            raise session_closed("sealed")
        return session

    def _new_session(self, claims: SessionClaims) -> OpenSession:
        # The trainer makes the key right before it invokes the session.
        invoked_at = claims.expires_at - self._token_s
        share = self.share(claims)
        self._shares.pop(claims.session_id, None)
        session = OpenSession(
            claims,
            Conversations(self._bundle, self._experts),
            expires_at=claims.expires_at,
            share=share,
            age_s=lambda: max(0.0, self._clock() - invoked_at),
        )
        if self._journal is not None:
            session.journal = self._write
        else:
            self._stats.unjournaled += 1
        return session

    async def _restore(self, claims: SessionClaims) -> None:
        """Restore what an earlier process recorded of the session, once. The agent determines its size."""
        name, journal = claims.session_id, self._journal
        if name in self._closed or name in self._sessions or journal is None or not journal.is_left(name):
            return
        if journal.is_lost(name):
            raise session_lost()

        async def restore() -> None:
            session = self._new_session(claims)
            try:
                records = await journal.load(name)
            except OSError as error:
                log.warning("the journal of a session cannot be read: %s", error)
                raise journal_unreadable(error.strerror or "") from None
            read = await session.share.cpu.run(_replay, session, records, tokenizes=False)
            journal.take(name)
            if name in self._closed:
                return
            self._sessions[name] = session
            for key, answer in read.answers:
                session.retries.remember(key, answer)
            if read.sealed is not None:
                self._seal(session, read.sealed["at"], journals.undelivered_of(read.sealed))

        if name not in self._restoring:
            self._restoring[name] = task = asyncio.create_task(restore())
            task.add_done_callback(lambda _: self._restoring.pop(name))
        await asyncio.shield(self._restoring[name])

    def _write(self, session: OpenSession, record: Record) -> None:
        assert self._journal is not None
        name = session.claims.session_id
        try:
            self._journal.append(name, record)
        except OSError:
            self._close_all({name: session.expires_at})
            raise journal_unwritable() from None

    def _seal(self, session: OpenSession, at: float, undelivered: Iterable[RecordedReply]) -> _SealedSession:
        session.close()
        self._stats.undelivered += len(session.conversations.drop(undelivered)) + session.conversations.closed
        session.conversations.leave_out()
        trajectory = asyncio.create_task(self._encode(session, len(session.unanswered)))
        trajectory.add_done_callback(report_failure("encoding a trajectory"))
        sealed = _SealedSession(trajectory, at, session.expires_at, SessionShare(self.cpu))
        self._sessions[session.claims.session_id] = sealed
        return sealed

    def _close_all(self, sessions: Mapping[str, float]) -> list[asyncio.Future[Answer]]:
        """Keep only these sessions' names, until the given times or longer. Return their calls, which end soon."""
        calls: list[asyncio.Future[Answer]] = []
        for name, until in sessions.items():
            session = self._sessions.pop(name, None)
            self.reports.pop(name, None)
            if session is not None:
                session.close()
                until = max(until, session.expires_at)
            if isinstance(session, OpenSession):
                calls += session.tasks
            self._closed[name] = max(until, self._closed.get(name, until))
        if self._journal is not None and sessions:
            self._journal.close({name: self._closed[name] for name in sessions})
        return calls

    async def _encode(self, session: OpenSession, unanswered: int) -> bytes:
        await asyncio.gather(*session.tasks, return_exceptions=True)

        def encode() -> bytes:
            segments = session.conversations.recorder.segments()
            trajectory = Trajectory(
                model=self._model_name,
                segments=segments,
                unanswered_calls=unanswered,
                images=session.conversations.images(segments),
            )
            if self._sealer is not None:
                trajectory = self._sealer.seal(trajectory, session.claims, session.first_call_s)
            data = trajectory.encode()
            if max(unpacked_size(data), sum(len(each.token_ids) for each in segments)) > _READ_FROM_BYTES:
                try:
                    Trajectory.decode(data, self._max_result_bytes)
                except ContractError as error:
                    raise trajectory_too_large(f"{len(segments)} segments; {error}") from None
            return data

        return await session.share.cpu.run(encode, tokenizes=False)


class _Replayed(NamedTuple):
    answers: Sequence[tuple[RequestKey, Answer]]
    sealed: Record | None


def _replay(session: OpenSession, records: memoryview) -> _Replayed:
    """Apply the records of a session, except for its answers: their futures belong to the event loop."""
    # By question: attempts since the last answer, and attempts without an answer.
    unanswered: Counter[bytes] = Counter()
    attempts: Counter[bytes] = Counter()
    answers: deque[tuple[RequestKey, Answer]] = deque(maxlen=MAX_ANSWERS)
    for record in journals.decode(records):
        match record["kind"]:
            case "asked":
                unanswered[record["call"]] += 1
                session.first_call_s = record["first_call_s"]
                # A retry belongs to an attempt that is already counted.
                if not record.get("is_retry"):
                    attempts[record["call"]] += 1
            case "dropped":
                for turn in journals.turns(record):
                    session.conversations.add(turn)
                _decrement(unanswered, record["call"])
            case "answered":
                for turn in journals.turns(record):
                    session.conversations.add(turn)
                session.text_bytes += journals.text_bytes(record)
                del unanswered[record["call"]]
                _decrement(attempts, record["call"])
                session.started, session.sampled_tokens = record["started"], record["sampled_tokens"]
                answers.append((RequestKey(record["request"], record["call"]), journals.answer_of(record)))
            case "sealed":
                session.unanswered = set(record["unanswered"])
                return _Replayed(answers, record)
    session.unanswered = set(unanswered)
    for question, failed in attempts.items():
        session.retries.failed(question, failed)
    return _Replayed(answers, None)


def _decrement(counts: Counter[bytes], key: bytes) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
