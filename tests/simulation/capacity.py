"""Limits of the agent runtime: outages, and a quota below the configured rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rollout_backend.errors import (
    NoCredentials,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)
from rollout_backend.run.dispatch.rate_limiter import TokenBucket
from tests.simulation.environment import Environment


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
    "no credentials": Refusal(lambda: NoCredentials("the call could not be signed")),
    "wrong clock": Refusal(lambda: WrongClock("InvalidSignatureException: Signature expired")),
    "no connection": Refusal(lambda: RuntimeUnavailable("connection refused", never_opened=True)),
}


@dataclass
class Outage:
    """A time from `since` until `until` in which the runtime refuses every call. Counts the invokes, and the stops
    that will get no answer afterwards, by session."""

    refusal: Refusal
    since: float
    until: float
    invokes: int = 0
    silent_stops: Counter[str] = field(default_factory=Counter)

    @classmethod
    def draw(cls, random: Random) -> Outage:
        since = random.random() * 60
        return cls(REFUSALS[random.choice(sorted(REFUSALS))], since, since + 60)

    def is_on(self, now: float) -> bool:
        return self.since <= now < self.until


@dataclass
class Limits:
    """What the runtime grants."""

    outage: Outage | None = None
    quota: TokenBucket | None = None

    @classmethod
    def draw(cls, env: Environment, planned: int | None) -> Limits:
        """`planned` is the number of rollouts of a step; None in a history of small steps."""
        outage = Outage.draw(env.random) if env.chance("outage") else None
        if outage is not None and env.faults.opened_by_503:
            outage.refusal = REFUSALS["503 after"]
        per_s = env.random.choice([1.0, 3.0]) * (1 if planned is None else planned / 32)
        return cls(outage, TokenBucket(per_s) if env.chance("hidden_quota") else None)

    def refusal(self, now: float) -> Refusal | None:
        """Return how calls are refused, if there is an outage now."""
        return self.outage.refusal if self.outage is not None and self.outage.is_on(now) else None

    def take(self, now: float) -> None:
        """Raises Throttled if this call is above the quota."""
        if self.quota is not None and not self.quota.try_take(now):
            raise Throttled("above the quota")
