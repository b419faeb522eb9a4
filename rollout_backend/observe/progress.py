"""The state of a run at one moment, for a display."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_backend.gateway.stats import GatewayStats


@dataclass(frozen=True)
class Progress:
    """Counts of a run's current steps. `phases` counts unsettled rollouts by phase, `outcomes` settled ones by class.

    `gateway` is None if the gateways did not answer. `warning` is empty unless the run needs attention.
    """

    phases: dict[str, int]
    outcomes: dict[str, int]
    open_sessions: int
    rewards: tuple[float, ...]
    gateway: GatewayStats | None
    warning: str = ""
