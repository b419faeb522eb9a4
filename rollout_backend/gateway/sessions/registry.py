"""Keep the sessions of one gateway. The first call opens a session, it closes once, and ends with its key.

Invariants:

- An open session becomes sealed or revoked and never reopens; later calls get status 410.
- The trajectory is what was recorded when the session was sealed, and the same bytes on every request. It excludes
  replies that no client received completely and no later call continues.
- A revoked session keeps only its name, and so does a sealed session `_FETCHABLE_S` after its seal.
- With a journal, sessions survive the process: the first call restores a session. A session whose journal cannot be
  written is revoked, because no later process could continue it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import ContractError, Trajectory
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES, unpacked_size
from rollout_backend.config import ExpertShape
from rollout_backend.core.api_error import journal_unwritable, session_closed, trajectory_too_large
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.dialects.base import RequestMemo
from rollout_backend.gateway.sessions import journal as journals
from rollout_backend.gateway.sessions.calls import InFlightCall, RetryCache
from rollout_backend.gateway.sessions.conversations import Conversations, RecordedReply
from rollout_backend.gateway.sessions.journal import Record, SessionJournal
from rollout_backend.gateway.sessions.share import SessionShare
from rollout_backend.gateway.stats import GatewayStats, bounded_name
from rollout_backend.rendering.renderer import RendererBundle

_FETCHABLE_S = 600.0  # after the seal; the wrapper retries for 30 s once a restarted gateway is back
_MAX_HEARD = 100_000
_READ_FROM_BYTES = 100_000  # smaller trajectories are below any limit

log = logging.getLogger(__name__)


@dataclass
class SessionState:
    """One session and its calls in flight. `conversations` is None once the session is sealed or revoked."""

    id: str
    expires_at: float
    conversations: Conversations | None
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    started: int = 0  # choices started so far
    sampled_tokens: int = 0  # of answered calls
    retries: RetryCache = field(default_factory=RetryCache)
    requests: RequestMemo = field(default_factory=RequestMemo)
    share: SessionShare = field(default_factory=SessionShare)
    unanswered: set[bytes] = field(default_factory=set)  # failed on our side and not repeated yet
    left_out: list[RecordedReply] = field(default_factory=list)  # replies that are not trained
    rollout_id: str = ""
    undelivered: set[InFlightCall] = field(default_factory=set)  # answered, but received by no client yet
    sealed: asyncio.Task[bytes] | None = None
    sealed_at: float = 0.0
    journal: Callable[[Record], None] | None = None  # appends to the session's part of the journal

    @property
    def is_open(self) -> bool:
        return self.conversations is not None

    def forget_calls(self) -> None:
        """Free what only an open session needs."""
        self.retries, self.requests, self.undelivered = RetryCache(), RequestMemo(), set()

    def write(self, record: Record) -> None:
        """Append a record to the journal, if there is one.

        Raises:
            ApiError: status 503 if the record cannot be written; this also closes the session.
        """
        if self.journal is not None:
            self.journal(record)


@dataclass(frozen=True)
class OpenSession:
    """An open session as seen by one model call. A call that outlives the session still has its conversations."""

    state: SessionState
    conversations: Conversations
    claims: SessionClaims


async def _abort(sessions: Iterable[SessionState]) -> None:
    calls = [call for session in sessions for call in session.calls]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


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
    ) -> None:
        """Without a `sealer`, trajectories carry no seal; without a `journal`, sessions end with this process.
        `experts` is the shape of the routing to record. A trajectory larger than `max_result_bytes` is not returned,
        because the trainer would refuse it.
        """
        self._stats = stats or GatewayStats()
        self._revoked: set[str] = set()  # the closed sessions that the trainer stopped
        self._max_result_bytes = max_result_bytes
        self._experts = experts
        self._bundle = bundle
        self._model_name = model_name
        self._token_s = session_key_s
        self._clock = clock
        self._sealer = sealer
        self._sessions: dict[str, SessionState] = {}
        self._journal = journal
        self._beats: set[str] = set()  # since the last call of `take_heartbeats`
        self._calls: set[str] = set()
        self._closed = dict(journal.closed) if journal is not None else {}  # name -> remembered until

    @property
    def open_count(self) -> int:
        return sum(session.is_open for session in self._sessions.values())

    @property
    def largest(self) -> dict[str, int]:
        """Return the rollout whose open session sampled the most tokens, with their number."""
        largest = max((s for s in self._sessions.values() if s.is_open), key=lambda s: s.sampled_tokens, default=None)
        return {largest.rollout_id: largest.sampled_tokens} if largest is not None else {}

    @property
    def closed_count(self) -> int:
        return len(self._sessions) - self.open_count + len(self._closed)

    def record_heartbeat(self, claims: SessionClaims) -> None:
        """Record a heartbeat of the session's container.

        Raises:
            ApiError: status 410 if the session was revoked, so the container may stop.
        """
        if claims.session_id in self._closed:
            self._refused_after_stop(claims.session_id)
            raise session_closed("revoked, or sealed long ago")
        self._beats.add(claims.session_id)

    def take_heartbeats(self) -> HeartbeatReport:
        """Return the sessions that sent a heartbeat or call since the last request."""
        heard = HeartbeatReport(frozenset(self._beats), frozenset(self._calls))
        self._beats.clear()
        self._calls.clear()
        return heard

    def open(self, claims: SessionClaims) -> OpenSession:
        """Return the session of a key. The first call creates the session or restores it from the journal.

        Raises:
            ApiError: status 410 if it is closed.
        """
        if not claims.is_recorded:
            conversations = Conversations(self._bundle, self._experts)
            return OpenSession(
                SessionState(claims.session_id, claims.expires_at, conversations), conversations, claims
            )
        state = self._find(claims)
        if state.conversations is None:
            raise session_closed("sealed")
        return OpenSession(state, state.conversations, claims)

    def still_open(self, session: OpenSession) -> OpenSession:
        """Return the session as it is now. Raises ApiError (410) if it was closed in the meantime."""
        return self.open(session.claims) if session.claims.is_recorded else session

    async def seal(self, claims: SessionClaims) -> bytes:
        """Close the session, abort its calls in flight, and return its encoded trajectory.

        Raises:
            ApiError: status 410 if the session was revoked; 413 if the trajectory is too large.
        """
        state = self._find(claims)
        if state.conversations is not None:
            now = self._clock()
            replies = [reply for running in state.undelivered if not running.delivered for reply in running.replies]
            state.write(journals.sealed(now, state.unanswered, replies))
            self._seal(state, state.conversations, claims, now, replies)
        if state.sealed is None:
            raise session_closed("revoked")
        try:
            return await asyncio.shield(state.sealed)
        except asyncio.CancelledError:
            if state.sealed is None:  # revoked in the meantime
                raise session_closed("revoked") from None
            raise

    def share(self, claims: SessionClaims) -> SessionShare:
        """Return what the session of a key uses of this process. Raises ApiError (410) if it was revoked."""
        return self._find(claims).share

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Close these sessions, even if they have made no call yet, abort their calls and free their memory."""
        session_ids = list(session_ids)
        until = self._clock() + self._token_s
        self._revoked.update(session_ids)
        await _abort(self._close_all(dict.fromkeys(session_ids, until)))

    async def sweep(self) -> None:
        """Remove sessions whose keys have expired, and the contents of sessions that were sealed long ago."""
        now = self._clock()
        over = [
            session
            for session in self._sessions.values()
            if session.expires_at <= now or (session.sealed is not None and session.sealed_at + _FETCHABLE_S <= now)
        ]
        self._close_all({session.id: session.expires_at for session in over})
        self._closed = {name: until for name, until in self._closed.items() if until > now}
        self._revoked &= self._closed.keys()
        if len(self._calls) > _MAX_HEARD:  # the trainer does not poll
            self.take_heartbeats()
        if self._journal is not None:
            try:
                self._journal.sweep(self._closed, now, self._token_s)
            except OSError as error:
                log.warning("the journal's expired sessions could not be removed: %s", error)
        await _abort(over)

    def _refused_after_stop(self, name: str) -> None:
        if name in self._revoked:
            counts = self._stats.after_stop
            counts[bounded_name(counts, name)] += 1

    def _find(self, claims: SessionClaims) -> SessionState:
        name = claims.session_id
        if name in self._closed:
            self._closed[name] = max(self._closed[name], claims.expires_at)
            self._refused_after_stop(name)
            raise session_closed("revoked, or sealed long ago")
        self._calls.add(name)
        state = self._sessions.get(name)
        if state is None:
            conversations = Conversations(self._bundle, self._experts)
            state = SessionState(name, claims.expires_at, conversations, rollout_id=claims.rollout_id)
            self._sessions[name] = state
            if self._journal is not None:
                self._restore(OpenSession(state, conversations, claims), self._journal)
        state.expires_at = max(state.expires_at, claims.expires_at)
        return state

    def _restore(self, session: OpenSession, journal: SessionJournal) -> None:
        """Apply what an earlier process recorded of the session."""
        state = session.state
        restored = journals.RestoredSession(session.conversations)
        for record in journal.read(state.id):
            restored.apply(record)
        state.started, state.sampled_tokens = restored.started, restored.sampled_tokens
        state.unanswered, state.left_out = set(restored.unanswered), restored.left_out
        state.journal = lambda record: self._write(state, record)
        if restored.sealed_at is not None:
            self._seal(state, restored.conversations, session.claims, restored.sealed_at, restored.undelivered)
            return
        for answered in restored.answers:
            state.retries.remember(*answered)
        for question, attempts in restored.attempts.items():
            state.retries.failed(question, attempts)

    def _write(self, state: SessionState, record: Record) -> None:
        assert self._journal is not None
        if state.id in self._closed:
            return  # revoked while this call was in flight
        try:
            self._journal.append(state.id, record)
        except OSError as error:
            log.exception("the journal of a session cannot be written: %s", error.strerror)
            self._close_all({state.id: state.expires_at})
            raise journal_unwritable() from None

    def _seal(
        self,
        state: SessionState,
        conversations: Conversations,
        claims: SessionClaims,
        at: float,
        undelivered: Iterable[RecordedReply],
    ) -> None:
        state.conversations = None
        self._stats.undelivered += len(conversations.drop(undelivered))
        conversations.leave_out(state.left_out)
        state.forget_calls()
        state.sealed = asyncio.create_task(
            self._encode(OpenSession(state, conversations, claims), len(state.unanswered))
        )
        state.sealed_at = at

    def _close_all(self, sessions: Mapping[str, float]) -> list[SessionState]:
        """Keep only the names of these sessions, each until the given time or longer.

        Returns:
            The sessions that existed. The caller has to abort their calls.
        """
        states = [state for name, until in sessions.items() if (state := self._close(name, until)) is not None]
        if self._journal is not None and sessions:
            try:
                self._journal.close({name: self._closed[name] for name in sessions})
            except OSError as error:
                log.warning("%d sessions are closed, but the journal does not record it: %s", len(sessions), error)
        return states

    def _close(self, session_id: str, until: float) -> SessionState | None:
        state = self._sessions.pop(session_id, None)
        if state is not None:
            until = max(until, state.expires_at)
            sealed, state.conversations, state.sealed = state.sealed, None, None
            state.journal = None  # which refers to the state
            state.forget_calls()
            if sealed is not None:
                sealed.cancel()
        self._closed[session_id] = max(until, self._closed.get(session_id, until))
        return state

    async def _encode(self, session: OpenSession, unanswered: int) -> bytes:
        await _abort([session.state])

        def encode() -> bytes:
            segments = session.conversations.recorder.segments()
            trajectory = Trajectory(
                model=self._model_name,
                segments=segments,
                unanswered_calls=unanswered,
                images=session.conversations.images(segments),
            )
            if self._sealer is not None:
                trajectory = self._sealer.seal(trajectory, session.claims)
            data = trajectory.encode()
            if max(unpacked_size(data), sum(len(each.token_ids) for each in segments)) > _READ_FROM_BYTES:
                try:
                    Trajectory.decode(data, self._max_result_bytes)
                except ContractError as error:
                    raise trajectory_too_large(len(segments), error) from None
            return data

        return await asyncio.to_thread(encode)
