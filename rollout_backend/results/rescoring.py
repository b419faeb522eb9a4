"""Compute the rewards of a run's stored rollouts again, and write them as a new version next to the stored ones.

RUN_DIR/rescored/NAME/scorer.json    the scorer, a digest of its file, and when it ran
RUN_DIR/rescored/NAME/STEP.jsonl     one line for each completed rollout: its stored reward and the new one

Invariants:

- The run's results, records and reports do not change, and no version replaces another.
- Versions are complete: a version's folder appears once every rollout has been scored.
- Only completed rollouts are scored. A rollout that cannot be scored has an error and no reward.
"""

import asyncio
import contextlib
import copy
import re
import secrets
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent_wrapper.contract import ContractError, Outcome
from rollout_backend.atomic_file import write_file
from rollout_backend.errors import ConfigError
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.comparison import (
    Difference,
    TaskReward,
    compare,
    reward_of,
    rewards_of_tasks,
    task_rewards,
)
from rollout_backend.results.records import RolloutRecord
from rollout_backend.scoring.scorer import ScoreInput, Scorer, ScoringError


class RescoredRollout(BaseModel, frozen=True):
    """A completed rollout with its stored and its new reward."""

    step: int
    rollout_id: str
    task_id: str
    old: float | None
    new: float | None  # None, never 0, if there is no new reward: see `error`
    error: str = ""


def with_rewards(
    records: Iterable[RolloutRecord], rescored: Iterable[RescoredRollout]
) -> tuple[list[RolloutRecord], list[RolloutRecord]]:
    """Return the records of the rollouts that have both rewards, and the same records with the new rewards."""
    rewards = {(each.step, each.rollout_id): each.new for each in rescored if each.new is not None}
    old, new = list[RolloutRecord](), list[RolloutRecord]()
    for record in records:
        reward = rewards.get((record.step, record.rollout_id))
        if reward is not None and record.result is not None:
            old.append(record)
            new.append(record.model_copy(update={"result": record.result.model_copy(update={"reward": reward})}))
    return old, new


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ScorerInfo(BaseModel, frozen=True):
    """The scorer of a version, and when it ran."""

    function: str
    file: str
    sha256: str  # of the file
    scored_at: datetime


class Rescoring(BaseModel, frozen=True):
    """One version of a run's rewards."""

    run: str
    folder: str  # folder of the version
    scorer: ScorerInfo
    rollouts: tuple[RescoredRollout, ...]  # completed rollouts by step, in the order in which they were planned
    tasks: tuple[TaskReward, ...]  # mean rewards over rollouts with both rewards, the largest difference first
    reward: Difference | None  # None if no rollout has both rewards

    @property
    def failures(self) -> tuple[RescoredRollout, ...]:
        """Return the rollouts without a new reward."""
        return tuple(each for each in self.rollouts if each.new is None)


def rescore(run_dir: Path, scorer: Scorer, name: str | None = None) -> Rescoring:
    """Score the completed rollouts of a run, and write the rewards as the version `name`.

    Raises:
        ConfigError: the run cannot be read, has no completed rollout, or already has a version of that name.
    """
    info = ScorerInfo(
        function=scorer.name,
        file=str(scorer.file),
        sha256=scorer.sha256,
        scored_at=datetime.now(UTC).replace(microsecond=0),
    )
    folder = _version_folder(run_dir, name or f"{scorer.name}-{info.scored_at:%Y%m%d-%H%M%S}")
    archive = RunArchive(run_dir)
    try:
        records = [record for step in archive.steps() for record in archive.read_records(step)]
    except ValueError as error:
        raise ConfigError(f"a record in {run_dir / 'steps'} cannot be read: {error}") from None
    tasks = archive.read_tasks(*archive.steps())
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    if not completed:
        raise ConfigError(f"{run_dir} has no completed rollout to score")
    if missing := sorted({record.task_id for record in completed} - tasks.keys()):
        raise ConfigError(f"{run_dir / 'steps'} does not have task {missing[0]!r}, so nothing can be scored")
    with contextlib.redirect_stdout(sys.stderr), asyncio.Runner() as runner:  # its output is no part of the result
        rollouts = tuple(_rescore(archive, record, scorer, tasks[record.task_id], runner) for record in completed)
    _write(folder, info, rollouts)
    old, new = with_rewards(completed, rollouts)
    return Rescoring(
        run=str(run_dir),
        folder=str(folder),
        scorer=info,
        rollouts=rollouts,
        tasks=task_rewards(rewards_of_tasks(old), rewards_of_tasks(new)),
        reward=reward_of(compare(old, new)),
    )


def _rescore(
    archive: RunArchive, record: RolloutRecord, scorer: Scorer, task: dict[str, Any], runner: asyncio.Runner
) -> RescoredRollout:
    new, problem = None, ""
    try:
        row = copy.deepcopy(task)
        rollout = archive.read_result(record)
        artifacts = archive.read_artifacts(rollout)
        given = ScoreInput(record.task_id, row["payload"], row.get("private", {}), rollout, artifacts)
        score = runner.run(scorer.score_async(given)) if scorer.is_async else scorer.score(given)
        new = score.reward
    except (ContractError, ScoringError) as error:
        problem = str(error)
    return RescoredRollout(
        step=record.step,
        rollout_id=record.rollout_id,
        task_id=record.task_id,
        old=record.reward,
        new=new,
        error=problem,
    )


def _version_folder(run_dir: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r} must be 1 to 128 letters, digits, '.', '_' or '-', and begin with one")
    folder = run_dir / "rescored" / name
    if folder.exists():
        raise ConfigError(f"{folder} exists, and no version replaces another one: choose another --name")
    return folder


def _write(folder: Path, info: ScorerInfo, rollouts: tuple[RescoredRollout, ...]) -> None:
    lines: dict[int, list[str]] = defaultdict(list)
    for each in rollouts:
        lines[each.step].append(f"{each.model_dump_json()}\n")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        write_file(part / "scorer.json", info.model_dump_json(indent=1).encode())
        for step, of_step in lines.items():
            write_file(part / f"{step:08d}.jsonl", "".join(of_step).encode())
        part.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
