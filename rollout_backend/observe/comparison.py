"""Compare two runs: their settings, rewards by task, lengths and failures.

Invariant: rewards are compared on the tasks that both runs have, so that easier tasks do not look like a better run.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from agent_wrapper.contract import Outcome
from rollout_backend.core.records import ResultSummary, RolloutRecord
from rollout_backend.core.summary import Mean
from rollout_backend.errors import ConfigError
from rollout_backend.observe.archive import CONFIG, RunArchive

_OF_THE_PLACE = ("run_id", "output_dir")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Difference(_Frozen):
    """A setting, a version or a count that differs. None: the run does not have it."""

    name: str
    first: Any
    second: Any


class TaskReward(_Frozen):
    """The mean reward of a task in both runs."""

    task_id: str
    first: float
    second: float


class RewardDifference(_Frozen):
    """How much the second run's rewards are higher, as the mean of the differences of tasks that both runs have.

    `low` and `high` bound the 95% confidence interval of the mean over tasks like these (Student's t over the tasks'
    differences); None if there are fewer than 5 tasks.
    """

    tasks: int
    first: float
    second: float
    mean: float
    low: float | None
    high: float | None


class Lengths(_Frozen):
    """Means over the results of one run."""

    turns: float
    sampled_tokens: float
    agent_s: float | None


class Comparison(_Frozen):
    """How the second of two runs differs from the first."""

    first: str
    second: str
    settings: tuple[Difference, ...]
    versions: tuple[Difference, ...]
    changed_tasks: int  # tasks of both runs whose payloads differ; their rewards are not compared
    only_first: int  # tasks without a reward in the second run
    only_second: int
    reward: RewardDifference | None  # None: no task has a reward in both runs
    rewards: tuple[TaskReward, ...]  # by the size of the difference, largest first
    lengths: tuple[Lengths | None, Lengths | None]
    outcomes: tuple[Difference, ...]  # counts by outcome and reason


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two runs by their folders; of a training run, all steps together.

    Raises:
        ConfigError: a folder has no records, or they cannot be read.
    """
    runs = _Run(first), _Run(second)
    first_tasks, second_tasks = runs[0].tasks, runs[1].tasks
    changed = {each for each in first_tasks.keys() & second_tasks if first_tasks[each] != second_tasks[each]}
    means = [run.rewards(without=changed) for run in runs]
    shared = [task_id for task_id in means[0] if task_id in means[1]]
    both = [TaskReward(task_id=each, first=means[0][each], second=means[1][each]) for each in shared]
    return Comparison(
        first=str(first),
        second=str(second),
        settings=_differences(*(run.settings for run in runs)),
        versions=_differences(*(run.versions for run in runs)),
        changed_tasks=len(changed),
        only_first=len(means[0].keys() - means[1].keys()),
        only_second=len(means[1].keys() - means[0].keys()),
        reward=_reward_difference(both),
        rewards=tuple(sorted(both, key=lambda each: (-abs(each.second - each.first), each.task_id))),
        lengths=(_lengths(runs[0].results), _lengths(runs[1].results)),
        outcomes=_differences(*(run.outcomes for run in runs), equal_too=True),
    )


class _Run:
    """What a run's folder says."""

    def __init__(self, folder: Path) -> None:
        archive = RunArchive(folder)
        try:
            self._records = [record for step in archive.steps() for record in archive.read_records(step)]
            info = archive.read_info()
            config = folder / CONFIG
            settings = yaml.safe_load(config.read_text()) if config.is_file() else {}
            self.tasks = {str(row["task_id"]): row["payload"] for row in _rows(archive)}
        except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ConfigError(f"{folder} cannot be read: {error}") from None
        if not self._records:
            raise ConfigError(f"{folder} has no records of rollouts: its run was killed, or has not ended a step")
        self.settings = {k: v for k, v in _flat(settings).items() if k not in _OF_THE_PLACE}
        start = info.starts[-1] if info is not None else None
        agent = {f"agent {name}": value for name, value in start.agent.items()} if start is not None else {}
        self.versions = {**start.versions, "commit": start.commit, **agent} if start is not None else {}

    def rewards(self, without: set[str]) -> dict[str, float]:
        """Return the mean reward of the completed rollouts of each task."""
        found = defaultdict[str, list[float]](list)
        for record in self._records:
            if record.outcome is Outcome.COMPLETED and record.reward is not None and record.task_id not in without:
                found[record.task_id].append(record.reward)
        return {task_id: statistics.fmean(rewards) for task_id, rewards in found.items()}

    @property
    def results(self) -> list[ResultSummary]:
        return [record.result for record in self._records if record.result is not None]

    @property
    def outcomes(self) -> dict[str, int]:
        counts = Counter(map(_ending, self._records))
        return {"planned": len(self._records), **dict(sorted(counts.items()))}


def _rows(archive: RunArchive) -> Iterable[dict[str, Any]]:
    for step in archive.steps():
        file = archive.tasks_file(step)
        if file.is_file():
            yield from (from_json(line) for line in file.read_bytes().split(b"\n") if line)


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


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, equal_too: bool = False
) -> tuple[Difference, ...]:
    names = dict.fromkeys([*first, *second])
    found = [Difference(name=name, first=first.get(name), second=second.get(name)) for name in names]
    return tuple(each for each in found if equal_too or each.first != each.second)


def _reward_difference(tasks: Sequence[TaskReward]) -> RewardDifference | None:
    mean = Mean.of([task.second - task.first for task in tasks])
    if mean is None:
        return None
    return RewardDifference(
        tasks=len(tasks),
        first=statistics.fmean(task.first for task in tasks),
        second=statistics.fmean(task.second for task in tasks),
        mean=mean.value,
        low=None if mean.margin is None else mean.value - mean.margin,
        high=None if mean.margin is None else mean.value + mean.margin,
    )


def _lengths(results: Sequence[ResultSummary]) -> Lengths | None:
    if not results:
        return None
    timed = [result.agent_s for result in results if result.agent_s is not None]
    return Lengths(
        turns=statistics.fmean(result.turns for result in results),
        sampled_tokens=statistics.fmean(result.sampled_tokens for result in results),
        agent_s=statistics.fmean(timed) if timed else None,
    )
