"""Compute the numbers of a step from its records. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist, fmean, stdev

import numpy as np

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.results.records import RolloutRecord

_MIN_TASKS = 5  # minimum for a confidence interval
TAIL = 0.95  # fraction of a step's rollouts after which its tail begins


class Learning(StrEnum):
    """Class of a task's rewards. GRPO learns only from rewards that differ."""

    NEVER = "never solved"  # all rewards equal the step's lowest
    MIXED = "mixed"
    ALWAYS = "always solved"  # all rewards equal the step's highest
    FLAT = "all equal"  # equal rewards in between, or equal over the whole step
    UNKNOWN = "no reward"


@dataclass(frozen=True)
class Mean:
    """A mean over tasks with the half width of its 95 % confidence interval: Student's t over the tasks' values.

    `margin` is None for fewer than 5 tasks.
    """

    value: float
    margin: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean | None:
        if not values:
            return None
        if len(values) < _MIN_TASKS:
            return cls(fmean(values), None)
        return cls(fmean(values), _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True)
class TaskRewards:
    """The rewards of one task, without missing ones, and what they teach."""

    task_id: str
    records: tuple[RolloutRecord, ...]
    rewards: tuple[float, ...]
    learning: Learning

    @property
    def mean(self) -> float | None:
        return mean(self.rewards)


@dataclass(frozen=True)
class Seconds:
    """Seconds of each phase of a rollout. A phase that did not happen or is unknown is 0."""

    waiting: float = 0.0  # from planning until the first invoke that was not throttled
    starting: float = 0.0  # until the agent accepted
    model: float = 0.0  # in model calls
    own: float = 0.0  # in the agent's own code and tools
    publishing: float = 0.0  # from the agent's end until its result arrived here
    lost: float = 0.0  # in sessions without a result, and until the next attempt

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def parts(self) -> list[tuple[str, str, float, float]]:
        """Return the phases that took time: field, name, seconds, and fraction of the total."""
        named = [(key, name, getattr(self, key)) for key, name in PHASES.items()]
        return [(key, name, seconds, seconds / self.total) for key, name, seconds in named if seconds > 0]

    @property
    def session(self) -> float:
        """Return the seconds since the first invoke, in which a session may have been open."""
        return self.total - self.waiting


PHASES = {  # the fields of Seconds
    "waiting": "waiting for an invoke",
    "starting": "session start",
    "model": "model calls",
    "own": "agent and tools",
    "publishing": "publishing the result",
    "lost": "sessions without a result",
}


@dataclass(frozen=True)
class StepSummary:
    """The numbers of a step. A ratio without a denominator is None."""

    planned: int
    outcomes: dict[Outcome | None, int]
    reward: Mean | None  # over all rewards; its margin is over tasks
    tasks: tuple[TaskRewards, ...]  # lowest mean first, tasks without a reward last
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    cache_counted_tokens: int  # prompt tokens of rollouts whose engines report their cache hits
    seconds: float  # from the first plan to the last outcome
    spent: Seconds  # sum over all rollouts
    wasted_session_s: float  # of rollouts that are not trained
    attempts: int

    @property
    def completed(self) -> int:
        return self.outcomes.get(Outcome.COMPLETED, 0)

    @property
    def mean_reward(self) -> float | None:
        return self.reward.value if self.reward is not None else None

    @property
    def cache_hit(self) -> float | None:
        """Return the fraction of prompt tokens found in prefix caches; None if no engine reported it."""
        return self.cached_tokens / self.cache_counted_tokens if self.cache_counted_tokens else None

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / max(self.seconds, 1e-9)

    def tasks_of(self, learning: Learning) -> int:
        return sum(task.learning == learning for task in self.tasks)


def summarize(records: Sequence[RolloutRecord]) -> StepSummary:
    """Return the numbers of a step."""
    tasks = rewards_by_task(records)
    spent = [seconds_of(record) for record in records]
    results = [record.result for record in records if record.result is not None]
    outcomes: dict[Outcome | None, int] = defaultdict(int)
    for record in records:
        outcomes[record.outcome] += 1
    rewards = [reward for task in tasks for reward in task.rewards]
    over_tasks = Mean.of([task.mean for task in tasks if task.mean is not None])
    began, ended = span(records)
    return StepSummary(
        planned=len(records),
        outcomes=dict(outcomes),
        reward=Mean(fmean(rewards), over_tasks.margin) if over_tasks is not None else None,
        tasks=tasks,
        sampled_tokens=sum(each.sampled_tokens for each in results),
        prompt_tokens=sum(each.prompt_tokens for each in results),
        cached_tokens=sum(each.cached_tokens or 0 for each in results),
        cache_counted_tokens=sum(each.prompt_tokens for each in results if each.cached_tokens is not None),
        seconds=ended - began,
        spent=add(spent),
        wasted_session_s=sum(each.session for each, record in zip(spent, records, strict=True) if not record.trained),
        attempts=sum(record.attempts for record in records),
    )


def rewards_by_task(records: Iterable[RolloutRecord]) -> tuple[TaskRewards, ...]:
    """Return the tasks of a step, lowest mean reward first."""
    by_task: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_task[record.task_id].append(record)
    rewards = {
        task: tuple(each.reward for each in found if each.reward is not None) for task, found in by_task.items()
    }
    known = [reward for found in rewards.values() for reward in found]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    tasks = [
        TaskRewards(task, tuple(by_task[task]), found, _learning(found, low, high)) for task, found in rewards.items()
    ]
    return tuple(sorted(tasks, key=lambda task: math.inf if task.mean is None else task.mean))


def _learning(rewards: Sequence[float], low: float, high: float) -> Learning:
    if not rewards:
        return Learning.UNKNOWN
    if min(rewards) < max(rewards):
        return Learning.MIXED
    if low == high:
        return Learning.FLAT if 0 < low < 1 else Learning.ALWAYS if low >= 1 else Learning.NEVER
    return {low: Learning.NEVER, high: Learning.ALWAYS}.get(rewards[0], Learning.FLAT)


def seconds_of(record: RolloutRecord) -> Seconds:
    """Return where a rollout's time went."""
    end = record.settled_at
    if end is None:
        return Seconds()
    if record.invoked_at is None:  # it ended before an invoke, or its result is from before a restart
        return Seconds(waiting=max(0.0, end - record.planned_at) if record.result is None else 0.0)
    first = record.invoked_at if record.first_invoked_at is None else record.first_invoked_at
    waiting, before = max(0.0, first - record.planned_at), max(0.0, record.invoked_at - first)
    accepted = record.invoked_at if record.accepted_at is None else record.accepted_at  # by an earlier manager
    starting, work = max(0.0, accepted - record.invoked_at), max(0.0, end - accepted)
    if record.result is None:
        return Seconds(waiting=waiting, starting=starting, lost=before + work)
    agent = min(work, work if record.result.agent_s is None else record.result.agent_s)
    model = min(agent, record.result.model_s)
    return Seconds(
        waiting=waiting,
        starting=starting,
        model=model,
        own=agent - model,
        publishing=work - agent,
        lost=before,
    )


def add(times: Iterable[Seconds]) -> Seconds:
    """Return the sum over rollouts."""
    totals = dict.fromkeys(vars(Seconds()), 0.0)
    for each in times:
        for name, seconds in vars(each).items():
            totals[name] += seconds
    return Seconds(**totals)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return fmean(values) if values else None


def percentiles(values: Sequence[float], *wanted: float) -> tuple[float, ...]:
    """Return percentiles of one or more values, interpolated linearly."""
    return tuple(np.percentile(values, wanted).tolist())


def duration(rollout: LedgerEntry | RolloutRecord) -> float | None:
    """Return the seconds from a rollout's last invoke until it was settled; None if either never happened."""
    if rollout.invoked_at is None or rollout.settled_at is None:
        return None
    return max(0.0, rollout.settled_at - rollout.invoked_at)


def span(records: Iterable[RolloutRecord]) -> tuple[float, float]:
    """Return when a step's first rollout was planned, and when its last event happened."""
    times = [
        (each.planned_at, each.settled_at or each.accepted_at or each.invoked_at or each.planned_at)
        for each in records
    ]
    return (min(began for began, _ in times), max(ended for _, ended in times)) if times else (0.0, 0.0)


def tail_share(records: Sequence[RolloutRecord]) -> float | None:
    """Return the fraction of a step's time in which only its last rollouts were open; None for few rollouts."""
    ends = sorted(record.settled_at for record in records if record.settled_at is not None)
    if len(ends) < 20:
        return None
    began, ended = span(records)
    return (ended - ends[int(len(ends) * TAIL) - 1]) / max(ended - began, 1e-9)


def _t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t: Fisher's expansion, within 0.1% from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / (4 * freedom),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4),
    )
    return sum(terms)
