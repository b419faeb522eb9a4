"""All sessions of one gateway: opened by their first call, closed once, forgotten when their key has expired.

What must always hold:

- A session is open, then sealed or revoked, and never open again: its calls are answered 410 from then on.
- The trajectory is what was recorded when the session was sealed, and the same bytes each time it is asked for.
- A revoked session keeps nothing but its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import Trajectory
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.renderer import RendererBundle
from rollout_backend.gateway.session import Session
from rollout_backend.gateway.tokens import SessionClaims


def session_closed(why: str) -> ApiError:
    return ApiError(410, f"this session is closed ({why}); it cannot call the model any more", code="session_closed")


@dataclass
class Entry:
    """One session and its calls in flight. `session` is gone once it is sealed or revoked."""

    id: str
    expires_at: float
    session: Session | None
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    started: int = 0  # calls, ever
    unanswered: set[bytes] = field(default_factory=set)  # calls that failed on our side, until they are made again
    sealed: asyncio.Task[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self.session is not None


async def _abort(entries: Iterable[Entry]) -> None:
    calls = [call for entry in entries for call in entry.calls]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


class Registry:
    def __init__(
        self, bundle: RendererBundle, model_name: str, token_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._bundle = bundle
        self._model_name = model_name
        self._token_s = token_s
        self._clock = clock
        self._entries: dict[str, Entry] = {}

    @property
    def open_count(self) -> int:
        return sum(entry.is_open for entry in self._entries.values())

    @property
    def closed_count(self) -> int:
        return len(self._entries) - self.open_count

    @property
    def calls_in_flight(self) -> int:
        return sum(len(entry.calls) for entry in self._entries.values())

    def open(self, claims: SessionClaims) -> tuple[Entry, Session]:
        """The session of a key, made if this is its first call.

        Raises:
            ApiError: status 410, if it is closed.
        """
        entry = self._find(claims)
        if entry.session is None:
            raise session_closed("sealed" if entry.sealed else "revoked")
        return entry, entry.session

    async def seal(self, claims: SessionClaims) -> bytes:
        """Closes the session, aborts its calls in flight, and returns its encoded `Trajectory`.

        Raises:
            ApiError: status 410, if it was revoked.
        """
        entry = self._find(claims)
        if entry.session is not None:
            session, entry.session = entry.session, None
            entry.sealed = asyncio.create_task(self._encode(entry, session))
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
        entries = [self._entry(session_id, self._clock() + self._token_s) for session_id in session_ids]
        for entry in entries:
            self._drop(entry)
        await _abort(entries)

    async def sweep(self) -> None:
        """Forgets the sessions whose keys have expired."""
        now = self._clock()
        expired = [entry for entry in self._entries.values() if entry.expires_at <= now]
        for entry in expired:
            self._drop(entry)
            del self._entries[entry.id]
        await _abort(expired)

    def _find(self, claims: SessionClaims) -> Entry:
        entry = self._entry(claims.session_id, claims.expires_at)
        entry.expires_at = max(entry.expires_at, claims.expires_at)
        return entry

    def _entry(self, session_id: str, expires_at: float) -> Entry:
        entry = self._entries.get(session_id)
        if entry is None:
            entry = self._entries[session_id] = Entry(session_id, expires_at, Session(self._bundle))
        return entry

    def _drop(self, entry: Entry) -> None:
        sealed, entry.session, entry.sealed = entry.sealed, None, None
        if sealed is not None:
            sealed.cancel()

    async def _encode(self, entry: Entry, session: Session) -> bytes:
        await _abort([entry])

        def encode() -> bytes:
            return Trajectory(
                model=self._model_name,
                segments=session.trajectory.segments(),
                unanswered_calls=len(entry.unanswered),
            ).encode()

        return await asyncio.to_thread(encode)
