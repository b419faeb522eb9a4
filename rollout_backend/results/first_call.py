"""Warn if agents run and none of them has called the model. Pure."""

from __future__ import annotations

from rollout_backend.gateway.stats import GatewayStats


class FirstCall:
    """Waits for a run's first model call."""

    def __init__(self, url: str, setting: str, warn_after_s: float = 30.0) -> None:
        """`url` is the address that agents were given, and `setting` the one that decides it."""
        self.warning = ""
        self.arrived = False
        self._url = url
        self._setting = setting
        self._warn_after_s = warn_after_s
        self._silent_since: float | None = None

    def observe(self, now: float, running: int, stats: GatewayStats) -> None:
        """Update `arrived` and `warning`. `now` is in seconds of any monotonic clock; `running` counts agents."""
        refused = stats.errors.keys() - {"not_found"}  # a load balancer's health check may get that
        if stats.calls or stats.calls_in_flight or refused:
            self.arrived, self.warning = True, ""
        if self.arrived or not running:
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= self._warn_after_s:
            self.warning = (
                f"no model call has arrived for {now - self._silent_since:.0f} s, and agents run: can they reach "
                f"{self._url} ({self._setting})?"
            )
