"""Decide when model calls start: how many are in flight in one gateway process, and how many wait for an engine.

Invariants:

- At most `max_calls` choices are in flight, or one call more. This is the only limit while the engines' load is
  unknown or outdated.
- Calls that find no place wait, and no call is refused. Sessions take turns, as in `FairQueue`. One session has at
  most `max_session_calls` and half of `max_calls` choices in flight.
- Does no I/O.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager

from rollout_backend.base.fair_queue import FairQueue
from rollout_backend.model.gateway.stats import EngineLoad

_STALE_S = 10.0


class Admission:
    """Admission control for one gateway process. `max_queued_per_engine` bounds the mean queue of an engine."""

    def __init__(
        self,
        max_calls: int,
        max_queued_per_engine: int,
        max_session_calls: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_calls = max_calls
        self._max_queued = max_queued_per_engine
        self._clock = clock
        self._queue = FairQueue(min(max_session_calls, max(1, max_calls // 2)), self._has_room)
        self._loads: Mapping[str, EngineLoad] = {}
        self._observed_at = -math.inf
        self._in_flight_then = 0

    @property
    def in_flight(self) -> int:
        return self._queue.held

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    def place(self, session: Hashable, choices: int = 1) -> AbstractAsyncContextManager[None]:
        """Return a context that a session's call enters once it may start. Its choices are then in flight."""
        return self._queue.place(session, choices)

    def observe(self, loads: Mapping[str, EngineLoad]) -> None:
        """Set the current load of each engine that reports it, by URL."""
        self._loads = loads
        self._observed_at = self._clock()
        self._in_flight_then = self.in_flight
        self._queue.serve()

    def serve(self) -> None:
        """Start the calls that no longer have to wait, because the known load is outdated."""
        self._queue.serve()

    @property
    def loads(self) -> Mapping[str, EngineLoad]:
        """Return the current load of each engine; empty if it is unknown or outdated."""
        return self._loads if self._clock() - self._observed_at <= _STALE_S else {}

    def _has_room(self) -> bool:
        if self.in_flight >= self._max_calls:
            return False
        if not (loads := self.loads):
            return True
        # Calls started since the last poll are at the engines too; those beyond the free slots wait.
        waiting = sum(load.waiting for load in loads.values())
        waiting += max(0, self.in_flight - self._in_flight_then - sum(load.free for load in loads.values()))
        return waiting < self._max_queued * len(loads)
