"""A token bucket. Pure: the caller passes the time, in seconds of any monotonic clock."""

_ROUNDING = 1e-6  # of a token: without it, a timer that fires on time may find the bucket short by a rounding error


class TokenBucket:
    """Admits `rate` calls per second, with a burst of one second's worth."""

    def __init__(self, rate: float) -> None:
        if rate <= 0:
            raise ValueError(f"a rate must be above 0, not {rate}")
        self.rate = rate
        self._tokens = self._burst
        self._at = float("-inf")

    @property
    def _burst(self) -> float:
        return max(1.0, self.rate)

    def due(self, now: float) -> float:
        """Return the seconds until the next call may be sent; 0 if it may be sent now."""
        self._refill(now)
        return 0.0 if self._tokens >= 1 - _ROUNDING else (1 - self._tokens) / self.rate

    def take(self, now: float) -> None:
        """Count a call that is sent now."""
        self._refill(now)
        self._tokens -= 1

    def try_take(self, now: float) -> bool:
        """Count a call if it may be sent now, and return whether it may."""
        if self.due(now) > 0:
            return False
        self.take(now)
        return True

    def give_back(self) -> None:
        """Undo `take` for a call that was not sent."""
        self._tokens = min(self._burst, self._tokens + 1)

    def _refill(self, now: float) -> None:
        if now > self._at:
            if self._at != float("-inf"):
                self._tokens = min(self._burst, self._tokens + (now - self._at) * self.rate)
            self._at = now
