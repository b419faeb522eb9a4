"""Compute the numbers of a step from its records. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist, fmean, stdev
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.run.accounts.records import RolloutRecord

# Minimum number of tasks for a confidence interval.
_MIN_TASKS = 5
# The tail of a step begins after this fraction of its rollouts.
TAIL = 0.95


class Learning(StrEnum):
    """Class of a task's rewards. GRPO learns only from rewards that differ."""

    NEVER = "never solved"
    """All rewards equal the step's lowest."""
    MIXED = "mixed"
    ALWAYS = "always solved"
    """All rewards equal the step's highest."""
    FLAT = "all equal"
    """Equal rewards in between, or equal over the whole step."""
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

    waiting: float = 0.0
    """Time from planning until the first invoke that was not throttled."""
    starting: float = 0.0
    """Time until the agent accepted the invoke."""
    model: float = 0.0
    """Time in model calls."""
    own: float = 0.0
    """Time in the agent's own code and tools."""
    publishing: float = 0.0
    """Time from the agent's end until its result arrived."""
    lost: float = 0.0
    """Time in sessions without a result, and until the next attempt."""

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


# Keys are the fields of `Seconds`.
PHASES = {
    "waiting": "waiting for an invoke",
    "starting": "session start",
    "model": "model calls",
    "own": "agent and tools",
    "publishing": "publishing the result",
    "lost": "sessions without a result",
}


@dataclass(frozen=True)
class Usage:
    """Resources that some rollouts used. Usages can be added."""

    session_s: float = 0.0
    """Seconds of open sessions."""
    model_s: float = 0.0
    """Seconds of open sessions spent in model calls."""
    results: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.session_s + other.session_s, self.model_s + other.model_s, self.results + other.results)


NO_USAGE = Usage()


@dataclass(frozen=True)
class FailureCount:
    """Number of rollouts with the same outcome and reason."""

    outcome: Outcome
    reason: str
    number: int
    first: str
    """The first such rollout."""
    message: str = ""
    """Message of that rollout."""


def _with_unsettled(counts: Any) -> Any:
    """Return outcomes by name with the key None, which JSON writes as a string."""
    return {None if key == "None" else key: number for key, number in counts.items()}


class StepSummary(BaseModel, frozen=True):
    """The numbers of a step, whose size does not depend on its rollouts. A ratio without a denominator is None.

    Token counts and seconds are sums over rollouts. Ids are empty if no rollout applies.
    """

    planned: int
    outcomes: Annotated[dict[Outcome | None, int], BeforeValidator(_with_unsettled)]
    endings: dict[str, int]
    """Rollouts by "outcome: reason"."""
    left_out: dict[str, int]
    """Untrained rollouts by reason."""
    failures: tuple[FailureCount, ...]
    """Most frequent first."""
    first_failed: str
    """The first failed rollout, or else the first rollout."""

    reward: Mean | None
    """Mean over all rewards. Its margin is computed over tasks."""
    rewards: int
    completed_rewards: int
    completed_reward_sum: float
    spread: tuple[float, float] | None
    """10th and 90th percentile of the tasks' mean rewards."""
    tasks: int
    learning: dict[Learning, int]
    """Tasks by class."""

    sampled_tokens: int
    lengths: tuple[float, float] | None
    """Mean and 90th percentile of the sampled tokens of a result."""
    trained_tokens: int
    """Sampled tokens that can be trained."""
    prompt_tokens: int
    cached_tokens: int
    cache_counted_tokens: int
    """Prompt tokens of rollouts whose engines report their cache hits."""
    turns: int
    cut_replies: int

    began: float
    """When the first rollout was planned, in Unix seconds."""
    ended: float
    """When the last event happened, in Unix seconds."""
    spent: Seconds
    wasted_session_s: float
    """Resources used by rollouts that are not trained."""
    tail: float | None
    """Fraction of the step's time in which only its last rollouts were open; None for few rollouts."""
    slowest: str
    trained_use: Usage
    wasted_use: Usage
    """Resources used by rollouts that are not trained and by lost attempts."""
    retried: int
    """Rollouts with more than one attempt."""
    extra_attempts: int
    """Attempts after each rollout's first."""
    most_attempts: str

    @property
    def completed(self) -> int:
        return self.outcomes.get(Outcome.COMPLETED, 0)

    @property
    def trained(self) -> int:
        """Return the number of rollouts that the trainer gets."""
        return self.planned - sum(self.left_out.values())

    @property
    def mean_reward(self) -> float | None:
        return self.reward.value if self.reward is not None else None

    @property
    def cache_hit(self) -> float | None:
        """Return the fraction of prompt tokens found in prefix caches; None if no engine reported it."""
        return self.cached_tokens / self.cache_counted_tokens if self.cache_counted_tokens else None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / max(self.seconds, 1e-9)

    def tasks_of(self, learning: Learning) -> int:
        return self.learning.get(learning, 0)


def summarize(records: Sequence[RolloutRecord]) -> StepSummary:
    """Return the numbers of a step."""
    tasks = rewards_by_task(records)
    spent = [seconds_of(record) for record in records]
    results = [record.result for record in records if record.result is not None]
    tokens = [each.sampled_tokens for each in results]
    rewards = [reward for task in tasks for reward in task.rewards]
    means = [task.mean for task in tasks if task.mean is not None]
    over_tasks = Mean.of(means)
    began, ended = span(records)
    completed = [
        record.reward for record in records if record.outcome is Outcome.COMPLETED and record.reward is not None
    ]
    trained_use = wasted_use = NO_USAGE
    for record in records:
        used, lost = usage_of(record)
        trained_use, wasted_use = (
            (trained_use + used, wasted_use + lost) if record.trained else (trained_use, wasted_use + used + lost)
        )
    shown = next((record for record in records if record.failed), records[0] if records else None)
    return StepSummary(
        planned=len(records),
        outcomes=dict(Counter(record.outcome for record in records)),
        endings=dict(Counter(map(_ending, records))),
        left_out=dict(Counter(_why_left_out(record) for record in records if not record.trained)),
        failures=tuple(sorted(count_failures(records), key=lambda failure: -failure.number)),
        first_failed=shown.rollout_id if shown is not None else "",
        reward=Mean(fmean(rewards), over_tasks.margin) if over_tasks is not None else None,
        rewards=len(rewards),
        completed_rewards=len(completed),
        completed_reward_sum=sum(completed),
        spread=(percentiles(means, 10)[0], percentiles(means, 90)[0]) if means else None,
        tasks=len(tasks),
        learning=dict(Counter(task.learning for task in tasks)),
        sampled_tokens=sum(tokens),
        lengths=(fmean(tokens), percentiles(tokens, 90)[0]) if tokens else None,
        trained_tokens=sum(each.trained_tokens for each in results),
        prompt_tokens=sum(each.prompt_tokens for each in results),
        cached_tokens=sum(each.cached_tokens or 0 for each in results),
        cache_counted_tokens=sum(each.prompt_tokens for each in results if each.cached_tokens is not None),
        turns=sum(each.turns for each in results),
        cut_replies=sum(each.cut_replies for each in results),
        began=began,
        ended=ended,
        spent=add(spent),
        wasted_session_s=sum(each.session for each, record in zip(spent, records, strict=True) if not record.trained),
        tail=tail_share(records),
        slowest=max(records, key=lambda record: duration(record) or 0.0).rollout_id if records else "",
        trained_use=trained_use,
        wasted_use=wasted_use,
        extra_attempts=sum(max(0, record.attempts - 1) for record in records),
        retried=sum(record.attempts > 1 for record in records),
        most_attempts=max(records, key=lambda record: record.attempts).rollout_id if records else "",
    )


def _ending(record: RolloutRecord) -> str:
    outcome = str(record.outcome or "not settled")
    return f"{outcome}: {record.reason}" if record.reason else outcome


def _why_left_out(record: RolloutRecord) -> str:
    if record.trainable:
        return "group not usable"
    return record.reason or str(record.outcome or "not settled")


def usage_of(record: RolloutRecord) -> tuple[Usage, Usage]:
    """Return the usage of a rollout, and of its attempts before the one that delivered the result."""
    spent = seconds_of(record)
    lost = spent.lost if record.result is not None else 0.0
    return Usage(spent.session - lost, spent.model, int(record.result is not None)), Usage(lost)


def count_failures(records: Iterable[RolloutRecord]) -> list[FailureCount]:
    """Count these rollouts by the reason why they ended, in the order of first occurrence."""
    found: dict[tuple[Outcome, str], list[RolloutRecord]] = defaultdict(list)
    for record in records:
        if record.outcome is not None and record.failed:
            found[record.outcome, record.reason].append(record)
    return [FailureCount(*key, len(each), each[0].rollout_id, each[0].message) for key, each in found.items()]


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
    """Split a rollout's time into phases."""
    end = record.settled_at
    if end is None:
        return Seconds()
    if record.invoked_at is None:
        # The rollout ended before an invoke, or its result is from before a restart.
        return Seconds(waiting=max(0.0, end - record.planned_at) if record.result is None else 0.0)
    first = record.invoked_at if record.first_invoked_at is None else record.first_invoked_at
    waiting, before = max(0.0, first - record.planned_at), max(0.0, record.invoked_at - first)
    # `accepted_at` is missing if an earlier manager's invoke was accepted.
    accepted = record.invoked_at if record.accepted_at is None else record.accepted_at
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
