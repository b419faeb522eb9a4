"""Simulate an asynchronous trainer with heavy-tailed rollouts: pacing against dropping old groups.

    python benchmarks/staleness.py

Rollouts run at the same time and do not slow each other down; their durations have a log-normal distribution. A step
trains a batch, and requests one, `max_staleness` batches ahead. Each policy takes the oldest finished groups:

- `dropped`: verl's `max_off_policy_strategy=drop`. Finished groups that are too old are dropped and replaced.
- `awaited`: `max_staleness` of our sampler.
"""

import heapq
import random
from statistics import mean
from typing import NamedTuple

from common import Table

from rollout_backend.core.staleness import groups_to_await

BATCH = 32  # groups
GROUP = 8  # rollouts
STEPS, SEEDS = 200, 5
STEP_S = 60.0  # of training
MEDIAN_S = 20.0  # of a rollout
SIGMA = 1.0  # of its logarithm: one rollout of a hundred takes ten times the median


class Group(NamedTuple):
    """A group that was requested. `ends` and `longest` are in seconds."""

    requested_in: int
    ends: float
    longest: float


def train(policy: str, max_staleness: int, seed: int) -> tuple[float, float, float, float]:
    """Return which part of the groups was dropped, how often the longest tenth of groups is trained compared with all
    groups, for which part of the time the trainer was idle, and the steps per hour.
    """
    draw, now, idle_s, dropped = random.Random(seed), 0.0, 0.0, 0
    groups: list[Group] = []
    requested: list[float] = []
    trained: list[float] = []

    def request(count: int, step: int) -> None:
        for _ in range(count):
            requested.append(max(draw.lognormvariate(0.0, SIGMA) * MEDIAN_S for _ in range(GROUP)))
            groups.append(Group(step, now + requested[-1], requested[-1]))

    request(max_staleness * BATCH, 1)
    for step in range(1, STEPS + 1):
        request(BATCH, step)
        began = now
        while True:
            finished = sorted(group for group in groups if group.ends <= now)
            unfinished = [group for group in groups if group.ends > now]
            stale = [group for group in finished if step - group.requested_in > max_staleness]
            if policy == "dropped" and stale:
                dropped += len(stale)
                groups[:] = [group for group in groups if group not in stale]
                request(len(stale), step)
                continue
            ages = [group.requested_in for group in unfinished]
            may_take = policy == "dropped" or not groups_to_await(ages, step, max_staleness, BATCH)
            if len(finished) >= BATCH and may_take:
                break
            now = min(group.ends for group in unfinished)
        batch = finished[:BATCH]
        groups[:] = [group for group in groups if group not in batch]
        trained += [group.longest for group in batch]
        idle_s += now - began
        now += STEP_S
    limit = heapq.nlargest(len(requested) // 10, requested)[-1]
    of_trained, of_all = (mean(longest >= limit for longest in each) for each in (trained, requested))
    return dropped / len(requested), of_trained / of_all, idle_s / now, STEPS / now * 3600


def main() -> None:
    lines = []
    for limit in (1, 2, 4, 8):
        for policy in ("dropped", "awaited"):
            runs = [train(policy, limit, seed) for seed in range(SEEDS)]
            dropped, long, idle, speed = map(mean, zip(*runs, strict=True))
            lines.append([f"{limit}", policy, f"{dropped:.0%}", f"{long:.0%}", f"{idle:.0%}", f"{speed:.0f}"])
    figures = ("dropped", "groups trained of the longest tenth", "trainer idle", "steps per hour")
    print(Table(("`max_staleness`", "", *figures), lines).markdown())


if __name__ == "__main__":
    main()
