"""Limits of the simulated runtime: outages, and a quota below the configured rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rollout_backend.errors import QuotaExceeded, RuntimeCallError, RuntimeUnavailable, Throttled


@dataclass(frozen=True)
class Refusal:
    """A way to refuse calls."""

    make: Callable[[], RuntimeCallError]
    stops: bool = True  # stops are refused, too
    after: bool = False  # the session is opened nevertheless


REFUSALS = {
    "429": Refusal(lambda: Throttled("ThrottlingException: Rate exceeded")),
    "402": Refusal(lambda: QuotaExceeded("ServiceQuotaExceededException: active sessions"), stops=False),
    "500": Refusal(lambda: RuntimeUnavailable("InternalServerException: 500")),
    "500 after": Refusal(lambda: RuntimeUnavailable("InternalServerException: 500"), after=True),
    "503": Refusal(lambda: RuntimeUnavailable("ServiceUnavailableException: 503", refused=True)),
    "503 after": Refusal(lambda: RuntimeUnavailable("ServiceUnavailableException: 503", refused=True), after=True),
    "no connection": Refusal(lambda: RuntimeUnavailable("connection refused", never_opened=True)),
}


@dataclass
class Outage:
    """A time from `since` until `until` in which the runtime refuses every call. Counts the invokes."""

    refusal: Refusal
    since: float
    until: float
    invokes: int = 0

    @classmethod
    def draw(cls, random: Random) -> Outage:
        since = random.random() * 60
        return cls(REFUSALS[random.choice(sorted(REFUSALS))], since, since + 60)
