"""Observes which calls a trainer's queue admits, and records violations in `Evidence`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue
from tests.simulation.evidence import Evidence

_STOPS = (CallKind.STOP, CallKind.STOP_EARLIER)


@dataclass(eq=False)
class _Waiting:
    call: CallKind
    priority: int
    since: float


class _Quota:
    """The calls that one of the configured rates grants. Rounding may take a part of a call."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self.left = self._burst = max(1.0, per_s)
        self._at = 0.0

    def refill(self, now: float) -> None:
        self.left = min(self._burst, self.left + (now - self._at) * self._per_s)
        self._at = now

    def has_room(self) -> bool:
        return self.left > 1 - 1e-3


class AuditedQueue(CallQueue):
    """A queue whose admissions are compared with its configured rates and its order."""

    evidence: Evidence

    def __init__(self, invoke_per_s: float, stop_per_s: float, calls_per_s: float | None = None) -> None:
        super().__init__(invoke_per_s, stop_per_s, calls_per_s)
        self._shares_quota = calls_per_s is not None
        self._of_invokes, self._of_stops = _Quota(invoke_per_s), _Quota(stop_per_s)
        self._of_all = _Quota(calls_per_s or invoke_per_s + stop_per_s)
        self._in_line: list[_Waiting] = []

    async def admit(self, call: CallKind, priority: int = 0) -> None:
        now = asyncio.get_running_loop().time
        waiting = _Waiting(call, priority, now())
        self._in_line.append(waiting)
        try:
            await super().admit(call, priority)
        finally:
            self._in_line.remove(waiting)
        for quota in (self._of_invokes, self._of_stops, self._of_all):
            quota.refill(now())
        if call in (CallKind.INVOKE, CallKind.START):
            self._check_order(waiting, now())
        for quota in self._quotas(call):
            if not quota.has_room():
                self.evidence.admitted.append(f"{call.name} above its rate")
            quota.left -= 1

    def give_back(self, call: CallKind) -> None:
        for quota in self._quotas(call):
            quota.left += 1
        super().give_back(call)

    def _quotas(self, call: CallKind) -> tuple[_Quota, ...]:
        own = self._of_stops if call in _STOPS else self._of_invokes
        return (own, self._of_all) if self._shares_quota else (own,)

    def _check_order(self, admitted: _Waiting, now: float) -> None:
        """Compare an admitted invoke with the calls that have waited since an earlier time."""
        for other in self._in_line:
            # With quotas of their own, refused stops slow down alone.
            due = other.call is CallKind.STOP and self._shares_quota and self._of_stops.has_room()
            higher = other.call in (CallKind.INVOKE, admitted.call) and other.priority > admitted.priority
            if other.since < now and (due or higher):
                self.evidence.admitted.append(f"{admitted.call.name} before {other.call.name}")
