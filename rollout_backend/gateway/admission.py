"""Decide whether another model call may start, from the calls in flight and the engines' queues. Does no I/O.

Invariants:

- At most `max_calls` are in flight. This is the only limit while the engines' load is unknown or outdated.
- One session has at most `max_session_calls` and half of `max_calls` in flight.
- Refused calls get staggered Retry-After times, at the rate at which calls finish, so they do not return
  together.
"""

import math
import time
from collections.abc import Callable, Mapping

from rollout_backend.core.api_error import ApiError
from rollout_backend.gateway.stats import EngineLoad

_STALE_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60  # OpenAI's clients ignore a Retry-After above 60 s
_WEIGHT = 0.1  # weight of the latest call in the moving average of call times


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
        self.max_session_calls = min(max_session_calls, max(1, max_calls // 2))
        self._max_queued = max_queued_per_engine
        self._clock = clock
        self._in_flight = 0
        self._call_s: float | None = None  # moving average of call times
        self._loads: Mapping[str, EngineLoad] = {}
        self._observed_at = -math.inf
        self._in_flight_then = 0
        self._last_return = -math.inf  # the latest time at which a refused call has to retry

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def observe(self, loads: Mapping[str, EngineLoad]) -> None:
        """Set the current load of each engine that reports it, by URL."""
        self._loads = loads
        self._observed_at = self._clock()
        self._in_flight_then = self._in_flight

    @property
    def loads(self) -> Mapping[str, EngineLoad]:
        """Return the current load of each engine; empty if it is unknown or outdated."""
        return self._loads if self._clock() - self._observed_at <= _STALE_S else {}

    def began(self) -> None:
        self._in_flight += 1

    def ended(self, seconds: float | None = None) -> None:
        """Remove a call. `seconds` is its duration if it was answered."""
        self._in_flight -= 1
        if seconds is not None:
            self._call_s = seconds if self._call_s is None else self._call_s + _WEIGHT * (seconds - self._call_s)

    def check(self, held: int = 0, choices: int = 1) -> ApiError | None:
        """Return None if a call may start, otherwise the refusal: 429 with a Retry-After in whole seconds.

        `held` is the number of choices that its session has in flight.
        """
        if held and held + choices > self.max_session_calls:
            retry_s = min(max(math.ceil((self._call_s or 0.0) / held), _MIN_RETRY_S), _MAX_RETRY_S)
            return _refusal(f"this session has {held} model calls in flight (gateway.max_session_calls)", retry_s)
        if self._in_flight >= self._max_calls:
            retry_s = self._turn(self._in_flight + 1 - self._max_calls, self._in_flight)
            return _refusal("too many model calls are in flight", retry_s)
        if not (loads := self.loads):
            return None
        # Calls started since the last poll are at the engines too; those beyond the free slots wait.
        waiting = sum(load.waiting for load in loads.values())
        waiting += max(0, self._in_flight - self._in_flight_then - sum(load.free for load in loads.values()))
        excess = waiting + 1 - self._max_queued * len(loads)
        if excess <= 0:
            return None
        retry_s = self._turn(excess, waiting + sum(load.running for load in loads.values()))
        return _refusal("too many model calls wait for an engine", retry_s)

    def _turn(self, ahead: int, inside: int) -> int:
        """Return the seconds until `ahead` of the `inside` calls have ended and earlier refused calls have retried.

        The rate of finishing calls is their number divided by their duration (Little's law).
        """
        if self._call_s is None or inside == 0:
            return _MIN_RETRY_S
        now, each_s = self._clock(), self._call_s / inside
        turn = max(now + ahead * each_s, self._last_return + each_s)
        self._last_return = min(turn, now + _MAX_RETRY_S)
        return min(max(math.ceil(turn - now), _MIN_RETRY_S), _MAX_RETRY_S)


def _refusal(message: str, retry_s: int) -> ApiError:
    return ApiError(429, f"{message}: try again in {retry_s} s", code="rate_limit_exceeded", retry_after_s=retry_s)
