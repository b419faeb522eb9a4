"""Compare two runs: their settings, rewards by task, lengths and failures.

Invariant: rewards are compared on common tasks, so that a run with easier tasks does not look better.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from agent_wrapper.contract import Outcome
from rollout_backend.config import read_yaml
from rollout_backend.errors import ConfigError
from rollout_backend.results.archive import CONFIG, RunArchive
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.run_data import RunData, StepData, training_steps
from rollout_backend.results.summary import Mean, duration

REWARD = "reward"
Measure = Callable[[RolloutRecord], float | None]


@dataclass(frozen=True)
class Difference:
    """One measure of two runs: its mean in each, over the tasks that have it in both runs.

    `change` is the mean change of a task from the first run to the second, with its 95% confidence interval over such
    tasks.
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
    """Compare two runs by the records of each task, except the tasks in `without`.

    Rollouts without a value are left out, and so are measures that no task has in both runs.
    """
    kept = [[record for record in records if record.task_id not in without] for records in (first, second)]
    found = [
        _difference(name, better, *(_by_task(each, measure) for each in kept)) for name, measure, better in _MEASURES
    ]
    return tuple(difference for difference in found if difference is not None)


def reward_of(measures: Iterable[Difference]) -> Difference | None:
    """Return the difference of the rewards; None if no task has a reward in both runs."""
    return next((each for each in measures if each.name == REWARD), None)


def rewards_of_tasks(records: Iterable[RolloutRecord]) -> dict[str, float]:
    """Return the mean reward of each task that has one."""
    return _by_task(records, attrgetter("reward"))


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


def _cut(record: RolloutRecord) -> float | None:
    return record.result.cut_replies / record.result.turns if record.result and record.result.turns else None


_MEASURES: tuple[tuple[str, Measure, int], ...] = (
    (REWARD, attrgetter("reward"), 1),
    ("completed", lambda each: float(each.outcome is Outcome.COMPLETED), 1),
    ("sampled tokens", lambda each: each.result.sampled_tokens if each.result else None, 0),
    ("model calls", lambda each: each.result.turns if each.result else None, 0),
    ("replies cut at max_tokens", _cut, -1),
    ("prefix cache hit", lambda each: each.result.cache_hit if each.result else None, 1),
    ("seconds", lambda each: duration(each) if each.outcome is Outcome.COMPLETED else None, -1),
)


_OF_THE_PLACE = ("run_id", "output_dir", "runtime.session_logs")


class Entry(BaseModel, frozen=True):
    """A setting, version or count that differs. None if the run does not have it."""

    name: str
    first: Any
    second: Any


class TaskReward(BaseModel, frozen=True):
    """The mean rewards of a task, in two runs or by two scorers."""

    task_id: str
    first: float
    second: float


class Comparison(BaseModel, frozen=True):
    """The differences between two runs."""

    first: str
    second: str
    settings: tuple[Entry, ...]
    versions: tuple[Entry, ...]
    changed_tasks: int  # common tasks with different payloads; their rewards are not compared
    only_first: int  # tasks without a reward in the second run
    only_second: int
    measures: tuple[Difference, ...]  # measures that some task has in both runs
    rewards: tuple[TaskReward, ...]  # by the size of the difference, largest first
    outcomes: tuple[Entry, ...]  # counts by outcome and reason

    @property
    def reward(self) -> Difference | None:
        """Return the difference of the rewards; None if no task has a reward in both runs."""
        return reward_of(self.measures)


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two runs by their directories. The steps of a training are taken together, without its validations.

    Raises:
        ConfigError: a folder has no records, or they cannot be read.
    """
    runs = _Run(first), _Run(second)
    changed = changed_tasks(*(run.tasks for run in runs))
    means = [rewards_of_tasks(record for record in run.records if record.task_id not in changed) for run in runs]
    return Comparison(
        first=str(first),
        second=str(second),
        settings=_entries(*(run.settings for run in runs)),
        versions=_entries(*(run.versions for run in runs)),
        changed_tasks=len(changed),
        only_first=len(means[0].keys() - means[1].keys()),
        only_second=len(means[1].keys() - means[0].keys()),
        measures=compare(runs[0].records, runs[1].records, changed),
        rewards=task_rewards(*means),
        outcomes=_entries(*(run.outcomes for run in runs), equal_too=True),
    )


def task_rewards(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[TaskReward, ...]:
    """Return the mean rewards of tasks that have both, by the size of the difference, largest first."""
    both = [TaskReward(task_id=each, first=first[each], second=second[each]) for each in first if each in second]
    return tuple(sorted(both, key=lambda each: (-abs(each.second - each.first), each.task_id)))


def changed_tasks(first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the ids of tasks that both runs have, with different payloads."""
    return {each for each in first.keys() & second.keys() if first[each]["payload"] != second[each]["payload"]}


class _Run:
    """The contents of a run directory."""

    def __init__(self, folder: Path) -> None:
        archive = RunArchive(folder)
        try:
            steps = training_steps(archive)
            self.records = [record for step in steps for record in archive.read_records(step)]
            info = archive.read_info()
            config = folder / CONFIG
            settings = read_yaml(config) if config.is_file() else {}
            self.tasks = archive.read_tasks(*steps)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder} cannot be read: {error}") from None
        if not self.records:
            raise ConfigError(f"{folder} has no records of rollouts: its run was killed, or has not ended a step")
        self.settings = {k: v for k, v in _flat(settings).items() if k not in _OF_THE_PLACE}
        start = info.starts[-1] if info is not None else None
        agent = {f"agent {name}": value for name, value in start.agent.items()} if start is not None else {}
        self.versions = {**start.versions, "commit": start.commit, **agent} if start is not None else {}

    @property
    def outcomes(self) -> dict[str, int]:
        counts = Counter(map(_ending, self.records))
        return {"planned": len(self.records), **dict(sorted(counts.items()))}


def _ending(record: RolloutRecord) -> str:
    outcome = str(record.outcome or "not settled")
    return f"{outcome}: {record.reason}" if record.reason else outcome


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _entries(first: Mapping[str, Any], second: Mapping[str, Any], *, equal_too: bool = False) -> tuple[Entry, ...]:
    names = dict.fromkeys([*first, *second])
    found = [Entry(name=name, first=first.get(name), second=second.get(name)) for name in names]
    return tuple(each for each in found if equal_too or each.first != each.second)


def shown_comparison(
    run: RunData, steps: Sequence[StepData], against: RunData | None, others: Sequence[StepData]
) -> dict[str, Any]:
    """Return what the templates show of the other run, `against`: its steps `others`, compared with `steps`."""
    differences: tuple[Difference, ...] = ()
    if against is not None:
        sides = (against, others), (run, steps)
        tasks = [RunArchive(side.run_dir).read_tasks(*(each.step for each in of_side)) for side, of_side in sides]
        before, after = ([record for each in of_side for record in each.records] for _, of_side in sides)
        differences = compare(before, after, changed_tasks(*tasks))
    return {
        "against": against,
        "differences": differences,
        "reward_change": reward_of(differences),
        "common_tasks": max((each.tasks for each in differences), default=0),
    }
