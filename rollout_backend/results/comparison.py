"""Compare two runs, paired by task. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from agent_wrapper.contract import Outcome
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.summary import Mean, duration

REWARD = "reward"
Measure = Callable[[RolloutRecord], float | None]


@dataclass(frozen=True)
class Difference:
    """One measure of two runs: its mean in each, over the tasks that have it in both.

    `change` is the mean of the tasks' changes from the first run to the second, with its 95% confidence interval over
    tasks like these.
    """

    name: str
    first: float
    second: float
    change: Mean
    tasks: int
    better: int  # 1: higher is better; -1: lower is better; 0: neither

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.change.margin is not None and abs(self.change.value) > self.change.margin


def compare(
    first: Sequence[RolloutRecord], second: Sequence[RolloutRecord], without: Container[str] = ()
) -> tuple[Difference, ...]:
    """Compare two runs by what their records say of each task, but for the tasks `without`.

    A rollout without a value is left out, and so is a measure that no task has in both runs.
    """
    kept = [[record for record in records if record.task_id not in without] for records in (first, second)]
    found = [
        _difference(name, better, *(_by_task(each, measure) for each in kept)) for name, measure, better in _MEASURES
    ]
    return tuple(difference for difference in found if difference is not None)


def rewards_of_tasks(records: Iterable[RolloutRecord]) -> dict[str, float]:
    """Return the mean reward of each task that has one."""
    return _by_task(records, _reward)


def _difference(name: str, better: int, first: dict[str, float], second: dict[str, float]) -> Difference | None:
    shared = sorted(first.keys() & second.keys())
    change = Mean.of([second[task] - first[task] for task in shared])
    if change is None:
        return None
    means = [fmean(each[task] for task in shared) for each in (first, second)]
    return Difference(name, means[0], means[1], change, len(shared), better)


def _by_task(records: Iterable[RolloutRecord], measure: Measure) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        value = measure(record)
        if value is not None:
            found[record.task_id].append(value)
    return {task: fmean(values) for task, values in found.items()}


def _reward(record: RolloutRecord) -> float | None:
    return record.reward


def _cut(record: RolloutRecord) -> float | None:
    return record.result.cut_replies / record.result.turns if record.result and record.result.turns else None


def _hit(record: RolloutRecord) -> float | None:
    return record.result.cache_hit if record.result is not None else None


_MEASURES: tuple[tuple[str, Measure, int], ...] = (
    (REWARD, _reward, 1),
    ("completed", lambda each: float(each.outcome is Outcome.COMPLETED), 1),
    ("sampled tokens", lambda each: each.result.sampled_tokens if each.result else None, 0),
    ("model calls", lambda each: each.result.turns if each.result else None, 0),
    ("replies cut at max_tokens", _cut, -1),
    ("prefix cache hit", _hit, 1),
    ("seconds", lambda each: duration(each) if each.outcome is Outcome.COMPLETED else None, -1),
)
