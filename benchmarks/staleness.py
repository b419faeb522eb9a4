"""Simulate an asynchronous trainer with heavy-tailed rollouts: pacing against dropping old groups.

    python benchmarks/staleness.py

In virtual time; it takes a few seconds. Rollouts run at the same time and do not slow each other down, and their
durations have a log-normal distribution. A group ends with its longest rollout. A step trains a batch, and requests
one, `max_staleness` batches ahead. Each policy takes the oldest finished groups:

- `dropped`: verl's `max_off_policy_strategy=drop`. Finished groups that are too old are dropped and replaced.
- `awaited`: `max_staleness` of our sampler.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean

from rollout_backend.core.staleness import groups_to_await

BATCH = 32  # groups
GROUP = 8  # rollouts
STEP_S = 60.0  # of training
MEDIAN_S = 20.0  # of a rollout
SIGMA = 1.0  # of its logarithm: one rollout of a hundred takes ten times the median
LIMITS = (1, 2, 4, 8)
POLICIES = ("dropped", "awaited")


@dataclass(order=True)
class Group:
    """A group that was requested. `ends` and `longest` are in seconds."""

    requested_in: int
    ends: float
    longest: float = field(compare=False)


@dataclass
class Totals:
    """What a training came to. Durations are those of each group's longest rollout."""

    trained: list[float] = field(default_factory=list)
    requested: list[float] = field(default_factory=list)
    dropped: int = 0
    idle_s: float = 0.0
    seconds: float = 0.0


def train(policy: str, max_staleness: int, steps: int, seed: int) -> Totals:
    """Train with one of the policies."""
    draw, now, totals = random.Random(seed), 0.0, Totals()
    groups: list[Group] = []

    def request(count: int, step: int) -> None:
        for _ in range(count):
            longest = max(draw.lognormvariate(0.0, SIGMA) * MEDIAN_S for _ in range(GROUP))
            groups.append(Group(step, now + longest, longest))
            totals.requested.append(longest)

    request(max_staleness * BATCH, 1)
    for step in range(1, steps + 1):
        request(BATCH, step)
        began = now
        while True:
            finished = sorted(group for group in groups if group.ends <= now)
            unfinished = [group for group in groups if group.ends > now]
            stale = [group for group in finished if step - group.requested_in > max_staleness]
            if policy == "dropped" and stale:
                totals.dropped += len(stale)
                groups[:] = [group for group in groups if group not in stale]
                request(len(stale), step)
                continue
            requests = [group.requested_in for group in unfinished]
            may_take = policy == "dropped" or not groups_to_await(requests, step, max_staleness, BATCH)
            if len(finished) >= BATCH and may_take:
                break
            now = min(group.ends for group in unfinished)
        batch = finished[:BATCH]
        groups[:] = [group for group in groups if group not in batch]
        totals.trained += [group.longest for group in batch]
        totals.idle_s += now - began
        now += STEP_S
    totals.seconds = now
    return totals


def rows(steps: int, seeds: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| `max_staleness` | | dropped | groups trained of the longest tenth | trainer idle | steps per hour |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for limit in LIMITS:
        for policy in POLICIES:
            runs = [train(policy, limit, steps, seed) for seed in range(seeds)]
            dropped = mean(run.dropped / len(run.requested) for run in runs)
            idle = mean(run.idle_s / run.seconds for run in runs)
            speed = mean(steps / run.seconds * 3600 for run in runs)
            long = mean(map(share_of_long, runs))
            yield f"| {limit} | {policy} | {dropped:.0%} | {long:.0%} | {idle:.0%} | {speed:.0f} |"


def share_of_long(run: Totals) -> float:
    """Return how often the longest tenth of groups is trained, compared with all groups."""
    limit = heapq.nlargest(len(run.requested) // 10, run.requested)[-1]
    trained = sum(longest >= limit for longest in run.trained) / len(run.trained)
    return trained / (sum(longest >= limit for longest in run.requested) / len(run.requested))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for line in rows(options.steps, options.seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
