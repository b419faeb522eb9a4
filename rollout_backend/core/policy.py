"""Decide which groups are usable and when a step ends. Pure: group states in, a decision out.

Only trainable rollouts make a group usable. A rollout lost to the infrastructure never counts as a low reward: it is
missing, and the policy says what that means for its group:

- `strict`: a group needs all of its planned rollouts;
- `min_viable`: a group needs at least `group.min_viable` rollouts;
- `replace`: like `min_viable`, and each rollout lost to the infrastructure is replaced by a new one.

A group may be planned with spare rollouts; it is then complete once `size` of them are trainable. A group that can no
longer become usable is doomed. In both cases, its running rollouts are cancelled to save their cost.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rollout_backend.config import GroupConfig


@dataclass
class GroupState:
    """Counts of one task's rollouts. The ledger updates them as rollouts are planned and settled."""

    task_id: str
    needed: int  # number of trainable rollouts that makes the group usable
    open: dict[str, None] = field(default_factory=dict)  # ids of unsettled rollouts
    trainable: int = 0
    lost: int = 0  # lost to the infrastructure, or without a result
    replacements: int = 0  # number planned so far
    enough: int | None = None  # number of trainable rollouts that completes the group; None: all planned ones
    spare: int = 0  # number of spare rollouts

    @property
    def usable(self) -> bool:
        return self.trainable >= self.needed

    @property
    def complete(self) -> bool:
        """True if the group is usable and no longer waits for open rollouts."""
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
    replace: tuple[tuple[str, int], ...]  # task id, number of new rollouts
    cancel: tuple[Cancellation, ...]
    done: bool  # once this decision is carried out, none of these groups has an open rollout


@dataclass(frozen=True)
class GroupPolicy:
    max_replacements: int = 0  # per group; 0 unless the policy is `replace`
    target_groups: int | None = None

    @classmethod
    def from_config(cls, group: GroupConfig) -> GroupPolicy:
        return cls(
            max_replacements=group.max_replacements if group.policy == "replace" else 0,
            target_groups=group.target_groups,
        )

    def target_reached(self, complete: int) -> bool:
        """Return whether this many complete groups end the step."""
        return self.target_groups is not None and complete >= self.target_groups

    def decide(self, groups: Collection[GroupState]) -> Decision:
        """Decide which rollouts to replace and to cancel in these groups: all of the step, or the changed ones.

        Idempotent: once a decision is carried out, the next one is empty."""
        if self.target_reached(sum(group.complete for group in groups)):
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
            if group.trainable + len(group.open) + fresh < group.needed:
                cancel += [Cancellation(rid, "group_doomed") for rid in group.open]
                continue
            if fresh:
                replace.append((group.task_id, fresh))
            still_open = still_open or bool(group.open) or fresh > 0
        return Decision(replace=tuple(replace), cancel=tuple(cancel), done=not still_open)


@dataclass(frozen=True)
class StragglerRule:
    """Limit on the time of a rollout, relative to the finished rollouts of its step."""

    after: float  # fraction of the rollouts that must have finished
    factor: float

    @classmethod
    def from_config(cls, group: GroupConfig) -> StragglerRule | None:
        return None if group.straggler_after is None else cls(group.straggler_after, group.straggler_factor)

    def allowed_s(self, took: Sequence[float], still_open: int) -> float | None:
        """Return the limit in seconds from a rollout's own start; None while too few rollouts have finished.

        `took` holds the seconds of each finished rollout, sorted.
        """
        if not took or len(took) < self.after * (len(took) + still_open):
            return None
        return self.factor * percentile_95(took)


class Stragglers:
    """The running rollouts of a step that may become stragglers; none without a rule."""

    def __init__(self, rule: StragglerRule | None, is_running: Callable[[str, float], bool]) -> None:
        """`is_running` returns whether the rollout still runs in the attempt that began at that time."""
        self._rule = rule
        self._is_running = is_running
        self._took: list[float] = []  # sorted
        self._running: list[tuple[float, str]] = []  # a heap of the start times of attempts

    def started(self, rollout_id: str, began: float) -> None:
        if self._rule is not None:
            heappush(self._running, (began, rollout_id))

    def delivered(self, took: float) -> None:
        if self._rule is not None:
            insort(self._took, took)

    def due(self, now: float, still_open: int) -> tuple[list[str], float]:
        """Remove and return the stragglers, and return when the next rollout becomes one.

        To test a rollout again, start it again.
        """
        due: list[str] = []
        allowed = self._rule.allowed_s(self._took, still_open) if self._rule is not None else None
        while allowed is not None and self._running:
            began, rollout_id = self._running[0]
            running = self._is_running(rollout_id, began)
            if running and began + allowed > now:
                return due, began + allowed
            heappop(self._running)
            due += [rollout_id] if running else []
        return due, math.inf


def percentile_95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile of sorted values, interpolated linearly."""
    at, part = divmod(19 * (len(seconds) - 1), 20)
    after = seconds[min(at + 1, len(seconds) - 1)]
    return (seconds[at] * (20 - part) + after * part) / 20
