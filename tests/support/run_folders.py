"""The folders of runs, as their managers leave them, with chosen rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_wrapper.contract import Outcome
from builders import run_config
from rollout_backend.core.tasks import Task
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.records import ResultSummary, RolloutRecord
from rollout_backend.results.run_info import RunStart, RunState


def write_run(
    folder: Path,
    rewards: Mapping[str, Sequence[float | None]],
    *,
    state: RunState | None = "ended",
    payload: Any = None,
    **sections: Any,
) -> Path:
    """Write a run with one step. A reward of None is a rollout that the infrastructure lost.

    With `state` None nothing records the run's end, nor its rollouts.
    """
    config = run_config(run_id=folder.name, output_dir=folder.parent, **sections)
    archive = RunArchive(config.run_dir)
    archive.write_start(config, RunStart.of(config, "run", {"version": "1"}, None))
    archive.write_tasks(0, [Task(task_id, {"question": payload or task_id}) for task_id in rewards])
    if state is not None:
        planned = [(task_id, i, reward) for task_id, each in rewards.items() for i, reward in enumerate(each)]
        archive.write_records(0, [_record(*each) for each in planned])
        archive.write_end(state)
    archive.close()
    return config.run_dir


def _record(task_id: str, number: int, reward: float | None) -> RolloutRecord:
    lost = reward is None
    result = ResultSummary(
        reward=reward,
        turns=2,
        segments=1,
        sampled_tokens=10,
        prompt_tokens=20,
        cached_tokens=0,
        cut_replies=0,
        model_s=1.0,
        agent_s=3.0,
    )
    return RolloutRecord(
        step=0,
        rollout_id=f"{task_id}.{number}",
        task_id=task_id,
        group_usable=not lost,
        is_replacement=False,
        outcome=Outcome.INFRA_ERROR if lost else Outcome.COMPLETED,
        reason="throttled" if lost else "",
        message="",
        trainable=not lost,
        attempts=1,
        session_ids=(),
        log=None,
        planned_at=0.0,
        invoked_at=None,
        accepted_at=None,
        result_at=None if lost else 1.0,
        settled_at=1.0,
        result=None if lost else result,
    )
