"""Which groups are worth having, and so when a step may end. Pure: group states in, a decision out.

Only trainable rollouts make a group usable. A rollout lost to the infrastructure is never a low reward; it is
missing, and these rules say what a missing rollout means for its group:

- `strict`: a group needs every rollout it planned;
- `min_viable`: a group needs at least so many;
- `replace`: as min_viable, and for each rollout lost to the infrastructure a new one is planned.

A group may be planned with some rollouts to spare, and then needs no more once `size` of it are trainable. A group
that can no longer become usable is doomed. What still runs of either is cancelled, so that nobody pays for it.
Rollouts that carry only messages doom no group: their rewards are what an evaluation is after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

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
    messages_only: int = 0  # completed, and not trainable: they carry no tokens
    enough: int | None = None  # trainable rollouts with which it needs no more; None: all that are planned
    spare: int = 0  # planned beyond that

    @property
    def usable(self) -> bool:
        return self.trainable >= self.needed

    @property
    def complete(self) -> bool:
        """Usable, and nothing of it is still running, or needs to."""
        return self.usable and (not self.open or self.satisfied)

    @property
    def satisfied(self) -> bool:
        return self.enough is not None and self.trainable >= self.enough


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
            if group.satisfied:
                cancel += [Cancellation(rid, "target_reached") for rid in group.open]
                continue
            fresh = max(0, min(group.lost - group.spare, self.max_replacements) - group.replacements)
            if group.trainable + group.messages_only + len(group.open) + fresh < group.needed:
                cancel += [Cancellation(rid, "group_doomed") for rid in group.open]
                continue
            if fresh:
                replace.append((group.task_id, fresh))
            still_open = still_open or bool(group.open) or fresh > 0
        return Decision(replace=tuple(replace), cancel=tuple(cancel), done=not still_open)


@dataclass(frozen=True)
class StragglerRule:
    """How long a rollout may run, by what the others of its step took."""

    after: float  # this part of them is finished
    factor: float

    @classmethod
    def from_config(cls, group: GroupConfig) -> StragglerRule | None:
        return None if group.straggler_after is None else cls(group.straggler_after, group.straggler_factor)

    def allowed_s(self, took: Sequence[float], still_open: int) -> float | None:
        """Seconds from a rollout's own start; None while too few are finished. `took`: seconds of each that is."""
        if not took or len(took) < self.after * (len(took) + still_open):
            return None
        return self.factor * percentile_95(took)


def percentile_95(seconds: Sequence[float]) -> float:
    return seconds[0] if len(seconds) == 1 else quantiles(seconds, n=20, method="inclusive")[18]
