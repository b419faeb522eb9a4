"""All sessions of one gateway: opened by their first call, closed once, forgotten when their key has expired.

What must always hold:

- A session is open, then sealed or revoked, and never open again: its calls are answered 410 from then on.
- The trajectory is what was recorded when the session was sealed, and the same bytes each time it is asked for.
- A revoked session keeps nothing but its name, and so does a sealed one once nobody can still be fetching it.
- With a journal all of this outlives the process: a session is taken up again by its first call. One whose journal
  cannot be written is revoked, for nobody could go on with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import Trajectory
from rollout_backend.gateway import records
from rollout_backend.gateway.errors import journal_unwritable, session_closed
from rollout_backend.gateway.journal import Journal
from rollout_backend.gateway.records import Record
from rollout_backend.gateway.renderer import RendererBundle
from rollout_backend.gateway.replay import Replays
from rollout_backend.gateway.seal import Sealer
from rollout_backend.gateway.session import Session
from rollout_backend.gateway.tokens import SessionClaims

_FETCHED_S = 600.0  # after its seal; the wrapper tries for half a minute once the gateway is there

log = logging.getLogger(__name__)


@dataclass
class Entry:
    """One session and its calls in flight. `session` is gone once it is sealed or revoked."""

    id: str
    expires_at: float
    session: Session | None
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    started: int = 0  # replies, ever
    sampled_tokens: int = 0  # of the calls that were answered
    replays: Replays = field(default_factory=Replays)
    unanswered: set[bytes] = field(default_factory=set)  # calls that failed on our side, until they are made again
    sealed: asyncio.Task[bytes] | None = None
    sealed_at: float = 0.0
    journal: Callable[[Record], None] | None = None  # its own place in it

    @property
    def is_open(self) -> bool:
        return self.session is not None

    def write(self, record: Record) -> None:
        """Into the journal, where there is one.

        Raises:
            ApiError: status 503, if it cannot be written; the session is closed then.
        """
        if self.journal is not None:
            self.journal(record)


async def _abort(entries: Iterable[Entry]) -> None:
    calls = [call for entry in entries for call in entry.calls]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


class Registry:
    def __init__(
        self,
        bundle: RendererBundle,
        model_name: str,
        token_s: float,
        clock: Callable[[], float] = time.time,
        sealer: Sealer | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Without a `sealer` trajectories carry no seal; without a `journal` sessions end with this process."""
        self._bundle = bundle
        self._model_name = model_name
        self._token_s = token_s
        self._clock = clock
        self._sealer = sealer
        self._entries: dict[str, Entry] = {}
        self._journal = journal
        # The names of those that keep nothing else, and until when.
        self._closed = dict(journal.closed) if journal is not None else {}

    @property
    def open_count(self) -> int:
        return sum(entry.is_open for entry in self._entries.values())

    @property
    def closed_count(self) -> int:
        return len(self._entries) - self.open_count + len(self._closed)

    def open(self, claims: SessionClaims) -> tuple[Entry, Session]:
        """The session of a key, made if this is its first call.

        Raises:
            ApiError: status 410, if it is closed.
        """
        entry = self._find(claims)
        if entry.session is None:
            raise session_closed("sealed")
        return entry, entry.session

    async def seal(self, claims: SessionClaims) -> bytes:
        """Closes the session, aborts its calls in flight, and returns its encoded `Trajectory`.

        Raises:
            ApiError: status 410, if it was revoked.
        """
        entry = self._find(claims)
        if entry.session is not None:
            now = self._clock()
            entry.write(records.sealed(now, entry.unanswered))
            self._seal(entry, entry.session, claims, now)
        if entry.sealed is None:
            raise session_closed("revoked")
        try:
            return await asyncio.shield(entry.sealed)
        except asyncio.CancelledError:
            if entry.sealed is None:  # revoked meanwhile
                raise session_closed("revoked") from None
            raise

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Closes these sessions, whether they have called yet or not, aborts their calls and frees their memory."""
        until = self._clock() + self._token_s
        await _abort(self._close_all(dict.fromkeys(session_ids, until)))

    async def sweep(self) -> None:
        """Forgets the sessions whose keys have expired, and what those keep that were sealed long ago."""
        now = self._clock()
        over = [
            entry
            for entry in self._entries.values()
            if entry.expires_at <= now or (entry.sealed is not None and entry.sealed_at + _FETCHED_S <= now)
        ]
        self._close_all({entry.id: entry.expires_at for entry in over})
        self._closed = {name: until for name, until in self._closed.items() if until > now}
        if self._journal is not None:
            try:
                self._journal.sweep(self._closed, now, self._token_s)
            except OSError as error:
                log.warning("the journal could not be cleared of what is over: %s", error)
        await _abort(over)

    def _find(self, claims: SessionClaims) -> Entry:
        name = claims.session_id
        if name in self._closed:
            self._closed[name] = max(self._closed[name], claims.expires_at)
            raise session_closed("revoked, or sealed long ago")
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = Entry(name, claims.expires_at, Session(self._bundle))
            if self._journal is not None:
                self._take_up(entry, claims, self._journal)
        entry.expires_at = max(entry.expires_at, claims.expires_at)
        return entry

    def _take_up(self, entry: Entry, claims: SessionClaims, journal: Journal) -> None:
        """What an earlier process has written of the session."""
        assert entry.session is not None
        restored = records.Restored(entry.session)
        for record in journal.read(entry.id):
            restored.take(record)
        entry.started, entry.sampled_tokens = restored.started, restored.sampled_tokens
        entry.unanswered = restored.unanswered
        entry.journal = lambda record: self._write(entry, record)
        if restored.sealed_at is not None:
            self._seal(entry, restored.session, claims, restored.sealed_at)
            return
        for request, answer in restored.answers:
            entry.replays.remember(request, answer)

    def _write(self, entry: Entry, record: Record) -> None:
        assert self._journal is not None
        if entry.id in self._closed:
            return  # it was revoked while this call was under way
        try:
            self._journal.append(entry.id, record)
        except OSError as error:
            log.exception("what a session has sampled cannot be written down: %s", error.strerror)
            self._close_all({entry.id: entry.expires_at})
            raise journal_unwritable() from None

    def _seal(self, entry: Entry, session: Session, claims: SessionClaims, at: float) -> None:
        entry.session = None
        entry.replays = Replays()
        entry.sealed = asyncio.create_task(self._encode(entry, session, claims, len(entry.unanswered)))
        entry.sealed_at = at

    def _close_all(self, sessions: Mapping[str, float]) -> list[Entry]:
        """Keeps their names alone, each until then at least. The entries that there were, whose calls are left to
        abort."""
        entries = [entry for name, until in sessions.items() if (entry := self._close(name, until)) is not None]
        if self._journal is not None and sessions:
            try:
                self._journal.close({name: self._closed[name] for name in sessions})
            except OSError as error:
                log.warning("%d sessions are closed, and the journal does not say so: %s", len(sessions), error)
        return entries

    def _close(self, session_id: str, until: float) -> Entry | None:
        """Keeps its name alone. The entry, if there was one, whose calls are left to abort."""
        entry = self._entries.pop(session_id, None)
        if entry is not None:
            until = max(until, entry.expires_at)
            sealed, entry.session, entry.sealed = entry.sealed, None, None
            entry.replays = Replays()
            if sealed is not None:
                sealed.cancel()
        self._closed[session_id] = max(until, self._closed.get(session_id, until))
        return entry

    async def _encode(self, entry: Entry, session: Session, claims: SessionClaims, unanswered: int) -> bytes:
        await _abort([entry])

        def encode() -> bytes:
            trajectory = Trajectory(
                model=self._model_name,
                segments=session.trajectory.segments(),
                unanswered_calls=unanswered,
                images=session.images(),
            )
            if self._sealer is not None:
                trajectory = self._sealer.seal(trajectory, claims)
            return trajectory.encode()

        return await asyncio.to_thread(encode)
