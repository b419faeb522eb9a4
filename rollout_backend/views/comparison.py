"""Compare two runs: their settings, rewards by task, lengths and failures.

Invariant: rewards are compared on common tasks, so that a run with easier tasks does not look better.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from rollout_backend.base.addresses import is_loopback
from rollout_backend.config import read_yaml
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import CONFIG, RunArchive
from rollout_backend.run.accounts.summary import Mean
from rollout_backend.run.accounts.task_totals import MEASURES, REWARD, RunTotals
from rollout_backend.views.run_data import RunData, StepData, training_steps


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
    better: int
    """1: higher is better; -1: lower is better; 0: neither."""

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.change.margin is not None and abs(self.change.value) > self.change.margin


def compare(first: RunTotals, second: RunTotals, without: Container[str] = ()) -> tuple[Difference, ...]:
    """Compare two runs by the totals of each task, except the tasks in `without`.

    Measures that no task has in both runs are left out.
    """
    found = []
    for name, (_, better) in MEASURES.items():
        before, after = first.means(name), second.means(name)
        shared = sorted(task for task in before.keys() & after.keys() if task not in without)
        change = Mean.of([after[task] - before[task] for task in shared])
        if change is not None:
            means = [fmean(each[task] for task in shared) for each in (before, after)]
            found.append(Difference(name, means[0], means[1], change, len(shared), better))
    return tuple(found)


def reward_of(measures: Iterable[Difference]) -> Difference | None:
    """Return the difference of the rewards; None if no task has a reward in both runs."""
    return next((each for each in measures if each.name == REWARD), None)


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
    changed_tasks: int
    """Common tasks with different payloads; their rewards are not compared."""
    only_first: int
    """Tasks without a reward in the second run."""
    only_second: int
    measures: tuple[Difference, ...]
    """Measures that some task has in both runs."""
    rewards: tuple[TaskReward, ...]
    """The tasks, largest difference first."""
    outcomes: tuple[Entry, ...]
    """Counts by outcome and reason."""

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
    changed = changed_tasks(*(run.totals for run in runs))
    means = [{task: mean for task, mean in run.totals.means(REWARD).items() if task not in changed} for run in runs]
    return Comparison(
        first=str(first),
        second=str(second),
        settings=tuple(each for each in _entries(*(run.settings for run in runs)) if not _is_of_this_machine(each)),
        versions=_entries(*(run.versions for run in runs)),
        changed_tasks=len(changed),
        only_first=len(means[0].keys() - means[1].keys()),
        only_second=len(means[1].keys() - means[0].keys()),
        measures=compare(runs[0].totals, runs[1].totals, changed),
        rewards=task_rewards(*means),
        outcomes=_entries(*(run.outcomes for run in runs), equal_too=True),
    )


def task_rewards(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[TaskReward, ...]:
    """Return the mean rewards of tasks that have both, by the size of the difference, largest first."""
    both = [TaskReward(task_id=each, first=first[each], second=second[each]) for each in first if each in second]
    return tuple(sorted(both, key=lambda each: (-abs(each.second - each.first), each.task_id)))


def changed_tasks(first: RunTotals, second: RunTotals) -> set[str]:
    """Return the ids of tasks that both runs have, with different payloads."""
    before, after = first.payloads, second.payloads
    return {each for each in before.keys() & after.keys() if before[each] != after[each]}


class _Run:
    """The contents of a run directory."""

    def __init__(self, folder: Path) -> None:
        archive = RunArchive(folder)
        try:
            steps = training_steps(archive)
            self.totals = RunTotals(map(archive.read_totals, steps))
            summaries = [archive.read_summary(step) for step in steps]
            info = archive.read_info()
            config = folder / CONFIG
            settings = read_yaml(config) if config.is_file() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder} cannot be read: {error}") from None
        if not summaries:
            raise ConfigError(f"{folder} has no records of rollouts: its run was killed, or has not ended a step")
        self.settings = {k: v for k, v in _flat(settings).items() if k not in _OF_THE_PLACE}
        start = info.starts[-1] if info is not None else None
        agent = {f"agent {name}": value for name, value in start.agent.items()} if start is not None else {}
        self.versions = {**start.versions, "commit": start.commit, **agent} if start is not None else {}

        endings: Counter[str] = sum((Counter(each.endings) for each in summaries), Counter())
        self.outcomes = {"planned": endings.total(), **dict(sorted(endings.items()))}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _is_of_this_machine(entry: Entry) -> bool:
    """Return whether both values are addresses of this machine, whose ports differ with each start."""
    values = [value if isinstance(value, list) else [value] for value in (entry.first, entry.second)]
    return all(is_loopback(urlsplit(str(each)).hostname or "") for value in values for each in value)


def _entries(first: Mapping[str, Any], second: Mapping[str, Any], *, equal_too: bool = False) -> tuple[Entry, ...]:
    names = dict.fromkeys([*first, *second])
    found = [Entry(name=name, first=first.get(name), second=second.get(name)) for name in names]
    return tuple(each for each in found if equal_too or each.first != each.second)


def shown_comparison(
    steps: Sequence[StepData], against: RunData | None, others: Sequence[StepData]
) -> dict[str, Any]:
    """Return the template values for the other run, `against`: its steps `others`, compared with `steps`."""
    differences: tuple[Difference, ...] = ()
    if against is not None:
        before, after = (RunTotals(step.read_totals() for step in of_side) for of_side in (others, steps))
        differences = compare(before, after, changed_tasks(before, after))
    return {
        "against": against,
        "differences": differences,
        "reward_change": reward_of(differences),
        "common_tasks": max((each.tasks for each in differences), default=0),
    }
