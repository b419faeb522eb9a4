"""Sessions that ended without being stopped, as the runtime has seen them. Pure.

Invariants:

- An end is evidence, not the outcome: the session may have published its result before. S3 decides.
- An end that is reported before its session is watched is not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_KEPT = 10_000  # ends of sessions that are not watched: mostly of those that were stopped meanwhile


@dataclass(frozen=True)
class SessionEnd:
    """A session that ended without being stopped."""

    session_id: str
    reason: str
    """The reason in the ledger, of those in `core.reasons`."""
    message: str
    final: bool = False
    """Another attempt would end in the same way, so none is made."""


class SessionEnds:
    """The ends of a run's sessions, for all its steps."""

    def __init__(self) -> None:
        self._ends: dict[str, SessionEnd] = {}
        self._watching: dict[str, Callable[[], None]] = {}

    def watch(self, session_id: str, on_end: Callable[[], None]) -> None:
        """Call `on_end` once the session has ended, or at once if it has."""
        self._watching[session_id] = on_end
        if session_id in self._ends:
            on_end()

    def report(self, end: SessionEnd) -> None:
        """Record an end."""
        self._ends[end.session_id] = end
        if len(self._ends) > _KEPT:
            del self._ends[next(iter(self._ends))]
        on_end = self._watching.get(end.session_id)
        if on_end is not None:
            on_end()

    def end_of(self, session_id: str | None) -> SessionEnd | None:
        return self._ends.get(session_id or "")

    def forget(self, session_ids: Iterable[str]) -> None:
        """Watch these sessions no more."""
        for session_id in session_ids:
            self._watching.pop(session_id, None)
            self._ends.pop(session_id, None)
