"""Detect sessions that ended without being stopped, from the runtime's reports or missing heartbeats. Pure.

Invariants:

- An end is evidence, not the outcome: the session may have published its result first. S3 decides.
- An end reported before its session is watched is not lost.
- Only sessions that have sent a heartbeat can miss one. Agents that implement the contract themselves send none.
- A missing heartbeat counts only while other sessions reach the same gateway. If no session reaches it, the gateway,
  a relay or the network may be down, and agents retry for minutes. If all sessions are silent, heartbeats count as
  missing after `_AGENTS_RETRY_S`, when agents stop retrying.
- Time in which the gateway did not answer does not count: it may be restarting, or this machine was suspended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

# Maximum number of recorded ends of unwatched sessions, most of which were stopped.
_KEPT = 10_000


@dataclass(frozen=True)
class SessionEnd:
    """A session that ended without being stopped."""

    session_id: str
    reason: str
    """A reason from `core.reasons`, for the ledger."""
    message: str
    final: bool = False
    """True if another attempt would end in the same way, so there is no retry."""


class SessionEnds:
    """The ended sessions of a run, for all its steps."""

    def __init__(self) -> None:
        self._ends: dict[str, SessionEnd] = {}
        self._watching: dict[str, Callable[[SessionEnd], None]] = {}

    def watch(self, session_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        """Call `on_end` when the session ends, or immediately if it has already ended."""
        self._watching[session_id] = on_end
        end = self._ends.pop(session_id, None)
        if end is not None:
            on_end(end)

    def report(self, end: SessionEnd) -> None:
        """Record an end."""
        on_end = self._watching.get(end.session_id)
        if on_end is not None:
            on_end(end)
            return
        self._ends[end.session_id] = end
        if len(self._ends) > _KEPT:
            del self._ends[next(iter(self._ends))]

    def forget(self, session_ids: Iterable[str]) -> None:
        """Stop watching these sessions."""
        for session_id in session_ids:
            self._watching.pop(session_id, None)
            self._ends.pop(session_id, None)


MISSED = 3
# Agents retry a model call for this time: see `RolloutContext.openai_kwargs`.
_AGENTS_RETRY_S = 300.0


@dataclass(frozen=True)
class HeartbeatReport:
    """Sessions that sent a gateway a heartbeat (`beats`), or called the model or fetched the trajectory (`calls`),
    since the last poll."""

    beats: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()


@dataclass
class _Gateway:
    asked_at: float | None = None
    """Time of the last poll; None if the gateway did not answer it."""
    # The total time in which agents demonstrably reached it, and the time since then without a request of theirs.
    proven_s: float = 0.0
    unproven_s: float = 0.0


class Heartbeats:
    """Detects missing heartbeats in all steps of a run."""

    def __init__(self, every_s: float, gateways: int = 1, *, same_machine: bool = False) -> None:
        """With `same_machine`, agents run on this machine, so they can reach a gateway that answers this process."""
        self.poll_s = every_s / 5
        self._every_s = every_s
        self._same_machine = same_machine
        self._gateways = [_Gateway() for _ in range(gateways)]
        self.any_arrived = False
        """Whether any session has reached a gateway, which shows that agents have the right address."""
        self._watched: set[str] = set()
        # The gateway that last heard from each session, with its `proven_s` at that time.
        self._last: dict[str, tuple[_Gateway, float]] = {}
        # The gateway that heard from each session before its latest invoke.
        self._earlier: dict[str, _Gateway] = {}

    def watch(self, session_id: str) -> None:
        """Watch a session from now on. Earlier heartbeats do not count: a repeated invoke may have replaced the
        container that sent them."""
        self._watched.add(session_id)
        if (last := self._last.pop(session_id, None)) is not None:
            self._earlier[session_id] = last[0]

    def expect(self, session_id: str) -> None:
        """Expect heartbeats from a session whose agent has accepted its rollout, if it sent some before."""
        if (gateway := self._earlier.pop(session_id, None)) is not None:
            self._last.setdefault(session_id, (gateway, gateway.proven_s))

    def forget(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            self._watched.discard(session_id)
            self._last.pop(session_id, None)
            self._earlier.pop(session_id, None)

    def observe(self, now: float, answers: Sequence[HeartbeatReport | None]) -> None:
        """Record each gateway's report; None if it did not answer."""
        for gateway, heard in zip(self._gateways, answers, strict=True):
            if heard is None:
                gateway.asked_at, gateway.unproven_s = None, 0.0
                continue
            if gateway.asked_at is not None:
                gateway.unproven_s += min(now - gateway.asked_at, 2 * self.poll_s)
            gateway.asked_at = now
            self.any_arrived |= bool(heard.beats or heard.calls)
            if heard.beats or heard.calls or self._same_machine:
                # Without this limit, the first heartbeat after a network outage would make other sessions look late.
                gateway.proven_s += min(gateway.unproven_s, 1.5 * self._every_s)
                gateway.unproven_s = 0.0
            elif gateway.unproven_s >= _AGENTS_RETRY_S:
                gateway.proven_s += gateway.unproven_s
                gateway.unproven_s = 0.0
            for session_id in heard.beats & self._watched | heard.calls & self._last.keys():
                self._last[session_id] = gateway, gateway.proven_s

    @property
    def lost_sessions(self) -> set[str]:
        """Return the sessions that missed `MISSED` consecutive heartbeats."""
        limit = MISSED * self._every_s
        return {name for name, (gateway, at) in self._last.items() if gateway.proven_s - at >= limit}

    async def poll(self, ask: Callable[[], Awaitable[Sequence[HeartbeatReport | None]]]) -> None:
        """Poll the gateways until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.poll_s)
            self.observe(loop.time(), await ask())
