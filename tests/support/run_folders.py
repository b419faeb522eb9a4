"""The results of steps, and the folders of runs as their managers leave them, with chosen rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_wrapper.contract import Outcome, Rollout
from builders import run_config
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord, StepRecords
from rollout_backend.run.accounts.run_info import RunStart, RunState
from rollout_backend.run.accounts.step_report import GroupResult, StepResult, failures_of, make_report
from rollouts import make_ledger, make_rollout


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


def write_training(folder: Path, *steps: tuple[int, Sequence[float]]) -> Path:
    """Write a run of verl: the number of each step, and the rewards of its tasks, which are named after rows."""
    config = run_config(run_id=folder.name, output_dir=folder.parent)
    archive = RunArchive(config.run_dir)
    archive.write_start(config, RunStart.of(config, "verl", {}, None))
    for number, rewards in steps:
        archive.write_tasks(number, [Task(f"t{i}", {"question": (number % 1000, i)}) for i in range(len(rewards))])
        results = enumerate(map(make_summary, rewards))
        archive.write_records(number, [make_record(f"t{i}.0", step=number, result=result) for i, result in results])
    archive.write_end("ended")
    archive.close()
    return config.run_dir


def _record(task_id: str, number: int, reward: float | None) -> RolloutRecord:
    lost = reward is None
    never = dict.fromkeys(("invoked_at", "accepted_at", "result_at"))
    fields = {"outcome": Outcome.INFRA_ERROR, "reason": "throttled", "group_usable": False, **never} if lost else {}
    result = None if lost else make_summary(reward, model_s=1.0, agent_s=3.0)
    return make_record(f"{task_id}.{number}", trainable=not lost, result=result, **fields)


def make_summary(reward: float | None, **more: Any) -> ResultSummary:
    fields = {"turns": 2, "segments": 1, "sampled_tokens": 10, "prompt_tokens": 20, "cached_tokens": 5, **more}
    own = {
        "reward": reward,
        "trained_tokens": fields["sampled_tokens"],
        "cut_replies": 0,
        "model_s": 3.0,
        "agent_s": 7.0,
    }
    return ResultSummary.model_validate({**own, **fields})


def make_record(rollout_id: str, **more: Any) -> RolloutRecord:
    fields = {
        "step": 0, "rollout_id": rollout_id, "task_id": rollout_id.rpartition(".")[0] or "a", "group_usable": True,
        "is_replacement": False, "outcome": Outcome.COMPLETED, "reason": "", "message": "", "trainable": False,
        "attempts": 1, "session_ids": (), "log": None, "planned_at": 100.0, "invoked_at": 101.0,
        "accepted_at": 102.0, "result_at": 110.0, "settled_at": 110.0,
    }  # fmt: skip
    return RolloutRecord.model_validate({**fields, **more})


def make_step(
    ends: Mapping[str, Rollout | float | tuple[str, ...]],
    *,
    step: int = 0,
    needed: int = 1,
    unclosed: Sequence[str] = (),
    delays: Sequence[float] = (),
    **report: Any,
) -> StepResult:
    """Return a step's result. A rollout ends with a result, a reward, or an outcome with its reason and message.

    `delays` are those from the agents' ends to the buffer. A group is usable with `needed` trainable rollouts.
    """
    ledger, arrived = make_ledger(step), list[Rollout]()
    groups: dict[str, list[Rollout | None]] = {}
    for rollout_id, end in ends.items():
        task_id = rollout_id.rpartition(".")[0]
        entry = ledger.plan(rollout_id, task_id)
        entry.start_attempt(f"session-{rollout_id}", 1, 100.0)
        ledger.session_closed(f"session-{rollout_id}")
        rollout = make_rollout(rollout_id, reward=end) if isinstance(end, float) else end
        groups.setdefault(task_id, []).append(rollout if isinstance(rollout, Rollout) else None)
        if isinstance(rollout, Rollout):
            failed = (rollout.failure.reason, rollout.failure.message) if rollout.failure else ()
            entry.deliver(rollout.outcome, *failed, trainable=rollout.trainable)
            arrived.append(rollout)
        else:
            outcome, *why = rollout
            entry.settle(Outcome(outcome), *why)
    for session_id in unclosed:
        ledger.session_unclosed(session_id, "409")
    made = []
    for task_id, found in groups.items():
        trained = tuple(each for each in found if each is not None and each.trainable)
        made.append(GroupResult(Task(task_id, {}), trained, usable=len(trained) >= needed, planned=len(found)))
    how = {"refused": 0, "seconds": 1.0, "deadline_reached": False, **report}
    written = make_report("run", ledger, made, arrived, list(delays), list(delays), **how)
    records = tuple(StepRecords(ledger, lambda entry: "", arrived).all())
    return StepResult(step, tuple(arrived), tuple(made), failures_of(ledger), written, records)
