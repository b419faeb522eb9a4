"""The `group` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollout_backend.config.section import Section


class GroupConfig(Section):
    size: int = Field(default=1, ge=1)
    """Rollouts per task."""
    policy: Literal["strict", "min_viable", "replace"] = "min_viable"
    """Which groups are usable. `strict`: those whose planned rollouts are all trainable. `min_viable`: those with at
    least `min_viable` trainable rollouts. `replace`: as min_viable, and the step starts a new rollout for each one
    lost to the infrastructure."""
    min_viable: int | None = Field(default=None, ge=1)
    """Trainable rollouts that make a group usable. Default: 2, or 1 if groups have one rollout."""
    max_replacements: int = Field(default=2, ge=0)
    """Maximum replacements in one group, under `replace`."""
    target_groups: int | None = Field(default=None, ge=1)
    """The step ends once this many groups are complete; the remaining rollouts are cancelled. Default: all groups."""
    oversample: int = Field(default=0, ge=0)
    """Additional rollouts per task. Once `size` rollouts of a group are trainable, its other rollouts are cancelled.
    Groups complete sooner, and are biased towards short rollouts: the report shows by how much."""
    straggler_after: float | None = Field(default=None, gt=0, le=1)
    """Once this fraction of a step's rollouts has finished, not counting lost and cancelled ones, the remaining
    rollouts have `straggler_factor` times the 95th percentile of the finished rollouts' durations. Default:
    `timeouts.agent_s` alone."""
    straggler_factor: float = Field(default=2.0, ge=1)
    """How much longer than the finished rollouts a rollout may run, from its own start, before it ends as a
    straggler."""
    block_task_after: int | None = Field(default=3, ge=1)
    """A task that lost all its rollouts to the infrastructure in this many consecutive steps or attempts at a step,
    while other tasks did not, is not dispatched again in this run. Null: tasks are never blocked."""

    @model_validator(mode="after")
    def _viable(self) -> Self:
        if self.min_viable is not None and self.min_viable > self.size:
            raise ValueError(f"min_viable={self.min_viable} is more than size={self.size}")
        return self

    @property
    def needed(self) -> int:
        """Return the number of trainable rollouts that make a group usable."""
        if self.policy == "strict":
            return self.size
        return self.min_viable if self.min_viable is not None else min(2, self.size)
