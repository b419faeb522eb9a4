"""The `circuit_breaker` section."""

from __future__ import annotations

from pydantic import Field

from rollout_backend.config.section import Section


class CircuitBreakerConfig(Section):
    """When a run stops with a diagnosis instead of losing more rollouts for the same reason."""

    max_failures: int | None = Field(default=20, ge=1)
    """Consecutive infrastructure failures for one reason, over all steps, that stop the run. The number of running
    rollouts is the minimum, because failures end sooner than successes. Null: the run never stops for this."""
    min_span_s: float = Field(default=30.0, ge=0)
    """Minimum time between the first and the last of these failures, so that a single burst does not stop the run."""
