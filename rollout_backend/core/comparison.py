"""Compare two runs, paired by task. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from agent_wrapper.contract import Outcome
from rollout_backend.core.records import RolloutRecord
from rollout_backend.core.summary import Mean, duration

Measure = Callable[[RolloutRecord], float | None]


@dataclass(frozen=True)
class Difference:
    """One measure of two runs: its mean in each, and the mean difference over the tasks that both measured.

    `paired` is the other run's subtracted from this run's, with a 95 % confidence interval over tasks.
    """

    name: str
    this: float | None
    other: float | None
    paired: Mean | None
    tasks: int
    better: int  # 1: higher is better; -1: lower is better; 0: neither

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0."""
        return (
            self.paired is not None and self.paired.margin is not None and abs(self.paired.value) > self.paired.margin
        )


def compare(this: Sequence[RolloutRecord], other: Sequence[RolloutRecord]) -> tuple[Difference, ...]:
    """Compare two runs by what their records say of each task. A rollout without a value is left out."""
    return tuple(_difference(name, measure, better, this, other) for name, measure, better in _MEASURES)


def _difference(
    name: str, measure: Measure, better: int, this: Sequence[RolloutRecord], other: Sequence[RolloutRecord]
) -> Difference:
    ours, theirs = _by_task(this, measure), _by_task(other, measure)
    shared = ours.keys() & theirs.keys()
    return Difference(
        name,
        _mean(ours),
        _mean(theirs),
        Mean.of([fmean(ours[task]) - fmean(theirs[task]) for task in sorted(shared)]),
        len(shared),
        better,
    )


def _by_task(records: Sequence[RolloutRecord], measure: Measure) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        value = measure(record)
        if value is not None:
            found[record.task_id].append(value)
    return found


def _mean(values: dict[str, list[float]]) -> float | None:
    flat = [value for found in values.values() for value in found]
    return fmean(flat) if flat else None


def _cut(record: RolloutRecord) -> float | None:
    return record.result.cut_replies / record.result.turns if record.result and record.result.turns else None


def _hit(record: RolloutRecord) -> float | None:
    result = record.result
    return result.cached_tokens / result.prompt_tokens if result and result.prompt_tokens else None


_MEASURES: tuple[tuple[str, Measure, int], ...] = (
    ("reward", lambda each: each.reward, 1),
    ("completed", lambda each: float(each.outcome is Outcome.COMPLETED), 1),
    ("sampled tokens", lambda each: each.result.sampled_tokens if each.result else None, 0),
    ("model calls", lambda each: each.result.turns if each.result else None, 0),
    ("replies cut at max_tokens", _cut, -1),
    ("prefix cache hit", _hit, 1),
    ("seconds", lambda each: duration(each) if each.outcome is Outcome.COMPLETED else None, -1),
)
