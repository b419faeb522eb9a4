"""How a batch of rollouts starts at the runtime's rate and number of sessions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout_backend.config import GroupConfig, RolloutConfig, RuntimeConfig
from rollout_backend.errors import ConfigError


@dataclass(frozen=True)
class Ramp:
    """The start of a batch."""

    rollouts: int
    per_s: float
    max_sessions: int

    @classmethod
    def of(cls, rollouts: int, limits: RuntimeConfig) -> Ramp:
        return cls(rollouts, limits.invoke_per_s, limits.max_sessions)

    @property
    def seconds(self) -> float:
        """Return the time from the first session to the last, at the configured rate."""
        return max(0, self.rollouts - 1) / self.per_s

    @property
    def waves(self) -> int:
        return math.ceil(self.rollouts / self.max_sessions)

    def __str__(self) -> str:
        text = (
            f"{self.rollouts:,} rollouts start within {self.seconds:.0f} s, at {self.per_s:g} sessions per second "
            "(runtime.invoke_per_s)"
        )
        if self.waves > 1:
            text += f", in {self.waves} waves of {self.max_sessions:,} sessions (runtime.max_sessions)"
        return text

    def check(self, collection_s: float, enough: int | None = None) -> None:
        """Refuse a batch that cannot finish. `enough` rollouts end the step, if not all are needed.

        Raises:
            ConfigError: the last rollout that is needed would start after the step's end.
        """
        needed = self if enough is None else Ramp(min(enough, self.rollouts), self.per_s, self.max_sessions)
        if needed.seconds >= collection_s:
            raise ConfigError(
                f"{needed.rollouts:,} rollouts cannot finish within timeouts.collection_s ({collection_s:g} s): at "
                f"runtime.invoke_per_s={self.per_s:g} the last one starts after {needed.seconds:.0f} s. Raise "
                "timeouts.collection_s, plan fewer rollouts, or raise runtime.invoke_per_s if the account's quota of "
                "new sessions allows it"
            )


def check_ramp(config: RolloutConfig, limits: RuntimeConfig, rollouts: int) -> tuple[str, bool]:
    """Describe how long a batch takes to start, and return whether all of it finishes even if each agent takes all of
    its time.

    Raises:
        ConfigError: it cannot finish within `timeouts.collection_s`.
    """
    ramp, times = Ramp.of(rollouts, limits), config.timeouts
    ramp.check(times.collection_s, enough_rollouts(config.group))
    if ramp.seconds + ramp.waves * times.agent_s <= times.collection_s:
        return str(ramp), True
    text = f"{ramp}; agents that take all of timeouts.agent_s do not all finish within timeouts.collection_s"
    return text, False


def startable_rollouts(config: RolloutConfig, limits: RuntimeConfig) -> int:
    """Return how many rollouts can start within `timeouts.collection_s`."""
    return 1 + math.floor(limits.invoke_per_s * config.timeouts.collection_s)


def enough_rollouts(group: GroupConfig) -> int | None:
    """Return how many rollouts end a step early. None if the step waits for all."""
    return None if group.target_groups is None else group.target_groups * group.needed
