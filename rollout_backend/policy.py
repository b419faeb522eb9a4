"""Which groups are worth having, and so when a step may end. Pure: group states in, a decision out.

Only trainable rollouts count. A rollout lost to the infrastructure is never a low reward; it is missing, and these
rules say what a missing rollout means for its group:

- `strict`: a group needs every rollout it planned;
- `min_viable`: a group needs at least so many;
- `replace`: as min_viable, and for each rollout lost to the infrastructure a new one is planned.

A group that can no longer become usable is doomed: what still runs of it is cancelled, so that nobody pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_backend.config import GroupConfig


@dataclass(frozen=True)
class GroupState:
    """Where the rollouts of one task stand."""

    task_id: str
    needed: int  # trainable rollouts that make it usable
    open: tuple[str, ...]  # ids of rollouts not yet settled
    trainable: int
    lost: int  # ended as infra_error
    replacements: int  # planned so far

    @property
    def usable(self) -> bool:
        return self.trainable >= self.needed

    @property
    def complete(self) -> bool:
        """Usable, and nothing of it is still running."""
        return self.usable and not self.open


@dataclass(frozen=True)
class Cancellation:
    rollout_id: str
    reason: str


@dataclass(frozen=True)
class Decision:
    replace: tuple[tuple[str, int], ...]  # task id, how many new rollouts
    cancel: tuple[Cancellation, ...]
    done: bool  # nothing will be open once the above is carried out


@dataclass(frozen=True)
class GroupPolicy:
    max_replacements: int = 0  # of one group; 0 unless the policy is `replace`
    target_groups: int | None = None

    @classmethod
    def from_config(cls, group: GroupConfig) -> GroupPolicy:
        return cls(
            max_replacements=group.max_replacements if group.policy == "replace" else 0,
            target_groups=group.target_groups,
        )

    def decide(self, groups: Sequence[GroupState]) -> Decision:
        """What to do now. Carrying it out and asking again changes nothing more."""
        if self.target_groups is not None and sum(group.complete for group in groups) >= self.target_groups:
            rest = tuple(Cancellation(rid, "target_reached") for group in groups for rid in group.open)
            return Decision(replace=(), cancel=rest, done=True)
        replace: list[tuple[str, int]] = []
        cancel: list[Cancellation] = []
        still_open = False
        for group in groups:
            fresh = max(0, min(group.lost, self.max_replacements) - group.replacements)
            if group.trainable + len(group.open) + fresh < group.needed:
                cancel += [Cancellation(rid, "group_doomed") for rid in group.open]
                continue
            if fresh:
                replace.append((group.task_id, fresh))
            still_open = still_open or bool(group.open) or fresh > 0
        return Decision(replace=tuple(replace), cancel=tuple(cancel), done=not still_open)
