"""List runs by their folders: when each began, its state, how much completed, and the mean reward."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic_core import from_json

from agent_wrapper.contract import Outcome
from rollout_backend.results.archive import CONFIG, RunArchive


class RunSummary(BaseModel, frozen=True):
    """One run. Times in unix seconds."""

    run_id: str
    folder: str
    began: float | None  # its last start; None: an older version of this package wrote the folder
    state: str  # a `RunState`, or `unknown`
    error: str = ""  # why its last start failed
    steps: int
    completed: int
    planned: int | None  # None: unknown, because the run was killed or still runs, and its settings cannot be read
    mean_reward: float | None  # of the completed rollouts


def list_runs(runs: Path) -> list[RunSummary]:
    """Return the runs whose folders are in a folder, the one that began last first."""
    found = [
        summarize_run(path) for path in runs.glob("*") if (path / "run.json").is_file() or (path / "steps").is_dir()
    ]
    return sorted(found, key=lambda run: (run.began or 0.0, run.run_id), reverse=True)


def summarize_run(folder: Path) -> RunSummary:
    """Return the state of the run in a folder."""
    archive = RunArchive(folder)
    try:
        info = archive.read_info()
    except ValueError:
        info = None
    steps = archive.begun_steps()
    completed, planned, rewards = 0, 0, list[float]()
    for step in steps:
        lines = archive.record_lines(step)
        planned += len(lines) or _planned(archive, step) or 0
        if not lines:  # the step is running, or its process was killed
            completed += len(archive.results(step))
        for line in lines:
            record = from_json(line)
            if record.get("outcome") == Outcome.COMPLETED:
                completed += 1
                reward = (record.get("result") or {}).get("reward")
                rewards += [] if reward is None else [reward]
    return RunSummary(
        run_id=folder.name,
        folder=str(folder),
        began=info.starts[-1].process.since if info is not None else None,
        state=info.starts[-1].current_state() if info is not None else "unknown",
        error=info.starts[-1].error if info is not None else "",
        steps=len(steps),
        completed=completed,
        planned=planned or None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def _planned(archive: RunArchive, step: int) -> int | None:
    """Return how many rollouts a step without records plans, from its tasks and the run's settings."""
    try:
        group = yaml.safe_load((archive.run_dir / CONFIG).read_text())["group"]
        tasks = archive.tasks_file(step).read_bytes().count(b"\n")
        return tasks * (int(group["size"]) + int(group["oversample"]))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
