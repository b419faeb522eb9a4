"""Rates of calls: a token bucket, and one that adapts to what the runtime grants. Pure: the caller passes the time.

Invariants of the adaptive rate:

- Over any window, at most `ceiling * window + burst` calls are admitted. The burst is one second's worth.
- The rate stays between `floor` and `ceiling`.
- Only calls sent after the last decrease change the rate: the refusals of one burst are one signal.
- After a refusal with a Retry-After, no call is admitted until that time has passed.

The algorithm is AIMD, as in TCP congestion avoidance: a refusal halves the rate, and granted calls raise it by a
fixed amount per second. Two such limiters that share a quota therefore converge to a fair share of it.
"""

# The time from the floor back to the ceiling.
_RECOVERY_S = 30.0
# Detects the end of an outage within a second, at the cost of 60 refused calls per minute.
_FLOOR_PER_S = 1.0
_DECREASE = 0.5
# In tokens. Without it, a timer that fires on time may find the bucket short by a rounding error.
_ROUNDING = 1e-6


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


class AdaptiveRate(TokenBucket):
    """A token bucket whose rate follows the outcomes of earlier calls. Times are in seconds."""

    def __init__(self, ceiling: float) -> None:
        """`ceiling` is the configured rate per second, and the initial rate."""
        super().__init__(ceiling)
        self.ceiling = ceiling
        self.floor = min(_FLOOR_PER_S, ceiling / 4)
        self._lowered_at = float("-inf")
        self._paused_until = float("-inf")

    def due(self, now: float) -> float:
        return max(super().due(now), self._paused_until - now)

    def granted(self, sent_at: float) -> bool:
        """Raise the rate a little: the runtime accepted a call that was sent at `sent_at`. Return whether it rose."""
        if sent_at < self._lowered_at or self.rate == self.ceiling:
            return False
        per_s = (self.ceiling - self.floor) / _RECOVERY_S
        self.rate = min(self.ceiling, self.rate + per_s / self.rate)
        return True

    def refused(self, sent_at: float, now: float, retry_after_s: float = 0.0) -> None:
        """Halve the rate and drop the burst, unless the call was sent before the last decrease."""
        self._paused_until = max(self._paused_until, now + retry_after_s)
        if sent_at >= self._lowered_at:
            self._refill(now)
            self.rate = max(self.floor, self.rate * _DECREASE)
            self._tokens = min(self._tokens, 0.0)
            self._lowered_at = now
