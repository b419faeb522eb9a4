"""Limit a server's restarts to a number within a sliding window. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """The restarts of one server. A restart counts for `window_s` seconds."""

    def __init__(self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._at: deque[float] = deque(maxlen=max_restarts)

    def wait_s(self) -> float:
        """Return the seconds until the next restart is allowed: 0 for now, infinity for never."""
        if len(self._at) < self._max:
            return 0.0
        return max(0.0, self._at[0] + self._window_s - self._clock()) if self._at else float("inf")

    def spend(self) -> None:
        """Count a restart now."""
        self._at.append(self._clock())
