"""Whether one more model call may enter, by what is in flight here and by what waits in the engines.

What must always hold:

- Never more than `max_calls` are in flight. That alone counts where loads are unknown, or too old to say anything.
- Those refused are told to come back one after another, as fast as calls leave, and not all at once.
- Nothing here does I/O: loads are observed, calls begin and end, and a verdict comes out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_backend.gateway.errors import ApiError

_STALE_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60  # OpenAI's clients follow no Retry-After above a minute
_WEIGHT = 0.1  # of the last call in the mean time of a call


@dataclass(frozen=True)
class EngineLoad:
    """Requests of one engine, whoever sent them: in its batch, waiting for a place there, and the places left."""

    running: int
    waiting: int
    free: int


class Admission:
    """Of one gateway process. `max_queued_per_engine` bounds what waits in the engines, on average."""

    def __init__(
        self, max_calls: int, max_queued_per_engine: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_calls = max_calls
        self._max_queued = max_queued_per_engine
        self._clock = clock
        self._in_flight = 0
        self._call_s: float | None = None  # mean time of a call, the later ones counting more
        self._loads: Sequence[EngineLoad] = ()
        self._observed_at = -math.inf
        self._in_flight_then = 0
        self._last_return = -math.inf  # when the last of those refused was told to come back

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def observe(self, loads: Sequence[EngineLoad]) -> None:
        """The load of each engine that tells it, as of now."""
        self._loads = loads
        self._observed_at = self._clock()
        self._in_flight_then = self._in_flight

    def began(self) -> None:
        self._in_flight += 1

    def ended(self, seconds: float | None = None) -> None:
        """`seconds` is how long the call took, if it was answered."""
        self._in_flight -= 1
        if seconds is not None:
            self._call_s = seconds if self._call_s is None else self._call_s + _WEIGHT * (seconds - self._call_s)

    def check(self) -> ApiError | None:
        """None if a call may begin; else what to answer it: 429, with a Retry-After of whole seconds."""
        if self._in_flight >= self._max_calls:
            retry_s = self._turn(self._in_flight + 1 - self._max_calls, self._in_flight)
            return _refusal("too many model calls are in flight", retry_s)
        if not self._loads or self._clock() - self._observed_at > _STALE_S:
            return None
        # Calls that came after the last look are in the engines too, as far as no place was free.
        waiting = sum(load.waiting for load in self._loads)
        waiting += max(0, self._in_flight - self._in_flight_then - sum(load.free for load in self._loads))
        excess = waiting + 1 - self._max_queued * len(self._loads)
        if excess <= 0:
            return None
        retry_s = self._turn(excess, waiting + sum(load.running for load in self._loads))
        return _refusal("too many model calls wait for an engine", retry_s)

    def _turn(self, ahead: int, inside: int) -> int:
        """Seconds until `ahead` of the calls `inside` have left, and those refused before have had their turn.

        As many leave per second as are inside, divided by how long each stays (Little's law).
        """
        if self._call_s is None or inside == 0:
            return _MIN_RETRY_S
        now, each_s = self._clock(), self._call_s / inside
        turn = max(now + ahead * each_s, self._last_return + each_s)
        self._last_return = min(turn, now + _MAX_RETRY_S)
        return min(max(math.ceil(turn - now), _MIN_RETRY_S), _MAX_RETRY_S)


def _refusal(message: str, retry_s: int) -> ApiError:
    return ApiError(429, f"{message}: try again in {retry_s} s", code="rate_limit_exceeded", retry_after_s=retry_s)
