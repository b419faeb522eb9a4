"""Score a run's stored rollouts again, and write the rewards as a new version next to the stored ones.

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
import functools
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from agent_wrapper.contract import ContractError, Outcome
from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.names import derived_name
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.task_totals import REWARD, RunTotals, TaskTotals
from rollout_backend.run.scoring.scorer import ScoreInput, Scorer, ScoringError
from rollout_backend.views.comparison import Difference, TaskReward, compare, reward_of, task_rewards
from rollout_backend.views.parallel import chunks, map_in_order


class RescoredRollout(BaseModel, frozen=True):
    """A completed rollout with its stored and its new reward."""

    step: int
    rollout_id: str
    task_id: str
    old: float | None
    new: float | None
    """None, never 0, if there is no new reward: see `error`."""
    error: str = ""


_MAX_FAILURES = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ScorerInfo(BaseModel, frozen=True):
    """The scorer of a version, and when it ran."""

    function: str
    file: str
    sha256: str
    """SHA-256 of the file."""
    scored_at: datetime


class Rescoring(BaseModel, frozen=True):
    """One version of a run's rewards."""

    run: str
    folder: str
    """Folder of the version."""
    scorer: ScorerInfo
    completed: int
    """Completed rollouts."""
    scored: int
    """Rollouts among them with a new reward."""
    changed: int
    """Rollouts among them whose reward differs from the stored one."""
    failures: tuple[RescoredRollout, ...]
    """The first rollouts without a new reward."""
    tasks: tuple[TaskReward, ...]
    """Mean rewards over rollouts with both rewards, the largest difference first."""
    reward: Difference | None
    """None if no rollout has both rewards."""

    def rollouts(self) -> Iterator[RescoredRollout]:
        """Read the completed rollouts by step, in the order in which they were planned."""
        for file in sorted(Path(self.folder).glob("*.jsonl"), key=lambda path: int(path.stem)):
            with file.open("rb") as lines:
                yield from map(RescoredRollout.model_validate_json, lines)


@dataclass(frozen=True)
class _Piece:
    """Some completed rollouts of a step, as lines of its records, with the rows of their tasks."""

    run_dir: Path
    step: int
    lines: Sequence[bytes]
    tasks: Mapping[str, Any]


@dataclass(frozen=True)
class _Scored:
    step: int
    rollouts: Sequence[RescoredRollout]
    old: TaskTotals
    new: TaskTotals


def rescore(
    run_dir: Path,
    scorer: Scorer,
    name: str | None = None,
    *,
    follow: Callable[[int, int], None] = lambda done, completed: None,
) -> Rescoring:
    """Score the completed rollouts of a run, and write the rewards as the version `name`.

    In a large run, several processes load the scorer and share the rollouts. `follow` is called with the numbers of
    scored and of completed rollouts.

    Raises:
        ConfigError: the run cannot be read, has no completed rollout, or already has a version of that name.
    """
    info = ScorerInfo(
        function=scorer.name,
        file=str(scorer.file),
        sha256=scorer.sha256,
        scored_at=datetime.now(UTC).replace(microsecond=0),
    )
    folder = _version_folder(
        run_dir, name or f"{derived_name(scorer.name, 'A-Za-z0-9._-', 100)}-{info.scored_at:%Y%m%d-%H%M%S}"
    )
    archive, old, new = RunArchive(run_dir), RunTotals(), RunTotals()
    completed = _count_completed(archive)
    done = scored = changed = 0
    failures = list[RescoredRollout]()
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        write_file(part / "scorer.json", info.model_dump_json(indent=1).encode())
        # The output of a scorer is no part of the result.
        with contextlib.redirect_stdout(sys.stderr):
            for piece in map_in_order(partial(_score_piece, scorer), _pieces(archive), completed):
                with (part / f"{piece.step:08d}.jsonl").open("ab") as file:
                    file.writelines(b"%s\n" % each.model_dump_json().encode() for each in piece.rollouts)
                old.add(piece.old)
                new.add(piece.new)
                done += len(piece.rollouts)
                scored += sum(each.new is not None for each in piece.rollouts)
                changed += sum(each.new is not None and each.new != each.old for each in piece.rollouts)
                missing = [each for each in piece.rollouts if each.new is None]
                failures += missing[: max(0, _MAX_FAILURES - len(failures))]
                follow(done, completed)
        part.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        _runner().close()
        _runner.cache_clear()
        shutil.rmtree(part, ignore_errors=True)
    return Rescoring(
        run=str(run_dir),
        folder=str(folder),
        scorer=info,
        completed=completed,
        scored=scored,
        changed=changed,
        failures=tuple(failures),
        tasks=task_rewards(old.means(REWARD), new.means(REWARD)),
        reward=reward_of(compare(old, new)),
    )


def _count_completed(archive: RunArchive) -> int:
    """Return the number of completed rollouts of a run whose steps all have their tasks."""
    completed = 0
    try:
        for step in archive.steps():
            completed += archive.read_summary(step).completed
            if missing := {*archive.read_totals(step).task_ids} - archive.read_tasks(step).keys():
                place = archive.run_dir / "steps"
                raise ConfigError(f"{place} does not have task {min(missing)!r}, so nothing can be scored")
    except ValueError as error:
        raise ConfigError(f"a record in {archive.run_dir / 'steps'} cannot be read: {error}") from None
    if not completed:
        raise ConfigError(f"{archive.run_dir} has no completed rollout to score")
    return completed


def _pieces(archive: RunArchive) -> Iterator[_Piece]:
    for step in archive.steps():
        tasks = archive.read_tasks(step)
        for lines in chunks(archive.record_lines(step)):
            ids = {from_json(line)["task_id"] for line in lines}
            yield _Piece(archive.run_dir, step, lines, {task: tasks[task] for task in ids})


# All calls of an async scorer in one process use the same event loop.
_runner = functools.cache(asyncio.Runner)


def _score_piece(scorer: Scorer, piece: _Piece) -> _Scored:
    archive = RunArchive(piece.run_dir)
    rollouts, old, new = list[RescoredRollout](), list[RolloutRecord](), list[RolloutRecord]()
    for record in map(RolloutRecord.model_validate_json, piece.lines):
        if record.outcome is not Outcome.COMPLETED:
            continue
        rescored = _rescore(archive, record, scorer, piece.tasks[record.task_id])
        rollouts.append(rescored)
        if rescored.new is not None and record.result is not None:
            old.append(record)
            result = record.result.model_copy(update={"reward": rescored.new})
            new.append(record.model_copy(update={"result": result}))
    return _Scored(piece.step, rollouts, TaskTotals.of(old, {}), TaskTotals.of(new, {}))


def _rescore(archive: RunArchive, record: RolloutRecord, scorer: Scorer, task: dict[str, Any]) -> RescoredRollout:
    new, problem = None, ""
    try:
        row = copy.deepcopy(task)
        rollout = archive.read_result(record)
        artifacts = archive.read_artifacts(rollout)
        given = ScoreInput(record.task_id, row["payload"], row.get("private", {}), rollout, artifacts)
        score = _runner().run(scorer.score_async(given)) if scorer.is_async else scorer.score(given)
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
