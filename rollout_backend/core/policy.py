"""Decide which groups are usable and when a step ends. Pure: group states in, a decision out.

Only trainable rollouts make a group usable. A rollout lost to the infrastructure never counts as a low reward: it is
missing, and the policy says what that means for its group:

- `strict`: a group needs all of its planned rollouts;
- `min_viable`: a group needs at least `group.min_viable` rollouts;
- `replace`: like `min_viable`, and each rollout lost to the infrastructure is replaced by a new one.

A group may be planned with spare rollouts; it is then complete once `size` of them are trainable. A group that can no
longer become usable is doomed. In both cases, its running rollouts are cancelled to save their cost.
"""

import math
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from rollout_backend.config import GroupConfig


@dataclass
class GroupState:
    """Counts of one task's rollouts. The ledger updates them as rollouts are planned and settled.

    `needed` trainable rollouts make the group usable; `enough` complete it (None: all planned ones). `open` has the
    ids of unsettled rollouts. `lost` counts rollouts lost to the infrastructure, or without a result.
    """

    task_id: str
    needed: int
    open: dict[str, None] = field(default_factory=dict)
    trainable: int = 0
    lost: int = 0
    replacements: int = 0
    enough: int | None = None
    spare: int = 0

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
class Decision:
    # The number of new rollouts by task, and the reason of a cancellation by rollout.
    replace: Mapping[str, int]
    cancel: Mapping[str, str]


class GroupPolicy:
    def __init__(self, group: GroupConfig) -> None:
        self._max_replacements = group.max_replacements if group.policy == "replace" else 0
        self._target_groups = group.target_groups

    def target_reached(self, complete: int) -> bool:
        """Return whether this many complete groups end the step."""
        return self._target_groups is not None and complete >= self._target_groups

    def decide(self, groups: Collection[GroupState]) -> Decision:
        """Decide which rollouts to replace and to cancel in these groups: all of the step, or the changed ones.

        Idempotent: after a decision is carried out, the next one is empty."""
        if self.target_reached(sum(group.complete for group in groups)):
            return Decision({}, {rollout_id: "target_reached" for group in groups for rollout_id in group.open})
        replace: dict[str, int] = {}
        cancel: dict[str, str] = {}
        for group in groups:
            fresh = max(0, min(group.lost - group.spare, self._max_replacements) - group.replacements)
            if group.satisfied:
                cancel |= dict.fromkeys(group.open, "target_reached")
            elif group.trainable + len(group.open) + fresh < group.needed:
                cancel |= dict.fromkeys(group.open, "group_doomed")
            elif fresh:
                replace[group.task_id] = fresh
        return Decision(replace, cancel)


class Running(Protocol):
    """A rollout whose agent runs since `began`, in loop seconds. See `LedgerEntry`."""

    began: float | None


class Stragglers:
    """Finds the stragglers among a step's running rollouts. There are none without `group.straggler_after`."""

    def __init__(self, group: GroupConfig, running: Mapping[str, Running]) -> None:
        """`running` holds the rollouts that run now, by id."""
        self._after = group.straggler_after
        self._factor = group.straggler_factor
        self._running = running
        self._took: list[float] = []
        self._started: list[tuple[float, str]] = []

    def started(self, rollout_id: str, began: float) -> None:
        if self._after is not None:
            heappush(self._started, (began, rollout_id))

    def delivered(self, took: float) -> None:
        if self._after is not None:
            insort(self._took, took)

    def allowed_s(self, still_open: int) -> float | None:
        """Return how many seconds a rollout may take from its start; None while too few rollouts have finished."""
        finished = len(self._took)
        if self._after is None or not finished or finished < self._after * (finished + still_open):
            return None
        return self._factor * percentile_95(self._took)

    def due(self, now: float, still_open: int) -> tuple[list[str], float]:
        """Remove and return the stragglers, and return when the next rollout becomes one.

        Call `started` again for a returned rollout that must be checked again.
        """
        due: list[str] = []
        allowed = self.allowed_s(still_open)
        while allowed is not None and self._started:
            began, rollout_id = self._started[0]
            entry = self._running.get(rollout_id)
            runs = entry is not None and entry.began == began
            if runs and began + allowed > now:
                return due, began + allowed
            heappop(self._started)
            due += [rollout_id] if runs else []
        return due, math.inf


def percentile_95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile of sorted values, interpolated linearly."""
    at, part = divmod(19 * (len(seconds) - 1), 20)
    after = seconds[min(at + 1, len(seconds) - 1)]
    return (seconds[at] * (20 - part) + after * part) / 20
