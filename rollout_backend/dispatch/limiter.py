"""A rate limit as a token bucket. Pure: times go in and waits come out; it owns no clock and no task.

What must always hold: over any window, no more than `rate * window + burst` reservations fall due.
"""

from __future__ import annotations


class TokenBucket:
    def __init__(self, rate: float, burst: float = 1.0) -> None:
        """`rate` per second; up to `burst` at once after a rest."""
        if rate <= 0 or burst < 1:
            raise ValueError(f"rate must be above 0 and burst at least 1, not {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = float("-inf")

    def reserve(self, now: float) -> float:
        """Takes one token and says how many seconds to wait before using it. Each call is one reservation."""
        if now > self._at:
            if self._at != float("-inf"):
                self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now
        self._tokens -= 1
        wait_from = max(0.0, self._at - now)  # after a pause, `_at` lies ahead
        return wait_from + max(0.0, -self._tokens / self.rate)

    def pause(self, now: float, seconds: float) -> None:
        """Somebody said slow down: nothing more falls due for so long, and no burst follows."""
        self._tokens = min(self._tokens, 0.0)
        self._at = max(self._at, now + seconds)
