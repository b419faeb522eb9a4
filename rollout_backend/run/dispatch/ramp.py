"""Compute how long a batch of rollouts takes to start, at the runtime's rate and number of sessions."""

from __future__ import annotations

import math

from rollout_backend.config import RolloutConfig, RuntimeConfig
from rollout_backend.errors import ConfigError


def check_ramp(config: RolloutConfig, limits: RuntimeConfig, rollouts: int) -> tuple[str, bool]:
    """Describe how long a batch takes to start, and return whether all of it finishes even if each agent takes all of
    its time.

    Raises:
        ConfigError: the last rollout that the step needs would start after `timeouts.collection_s`.
    """
    times, group, per_s = config.timeouts, config.group, limits.invoke_per_s
    needed = rollouts if group.target_groups is None else min(rollouts, group.target_groups * group.needed)
    needed_s = max(0, needed - 1) / per_s
    if needed_s >= times.collection_s:
        raise ConfigError(
            f"{needed:,} rollouts cannot finish within timeouts.collection_s ({times.collection_s:g} s): at "
            f"runtime.invoke_per_s={per_s:g} the last one starts after {needed_s:.0f} s. Raise "
            "timeouts.collection_s, plan fewer rollouts, or raise runtime.invoke_per_s if the account's quota of "
            "new sessions allows it"
        )
    seconds, waves = max(0, rollouts - 1) / per_s, math.ceil(rollouts / limits.max_sessions)
    text = (
        f"{rollouts:,} rollouts start within {seconds:.0f} s, at {per_s:g} sessions per second (runtime.invoke_per_s)"
    )
    if waves > 1:
        text += f", in {waves} waves of {limits.max_sessions:,} sessions (runtime.max_sessions)"
    if seconds + waves * times.agent_s <= times.collection_s:
        return text, True
    return f"{text}; agents that take all of timeouts.agent_s do not all finish within timeouts.collection_s", False


def startable_rollouts(config: RolloutConfig, limits: RuntimeConfig) -> int:
    """Return how many rollouts can start within `timeouts.collection_s`."""
    return 1 + math.floor(limits.invoke_per_s * config.timeouts.collection_s)
