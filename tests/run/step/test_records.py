"""A step keeps a record of every planned rollout, however the rollout and the step end."""

import asyncio

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen, InvokeRejected, RunHeld
from rollout_backend.run.step.step import Step
from step_bench import Agents, only


def outcomes(step: Step) -> dict[str, tuple[Outcome | None, str]]:
    return {record.rollout_id: (record.outcome, record.reason) for record in step.results.records.all()}


async def test_each_outcome_is_recorded_with_its_sessions_and_times(open_bench):
    bench = await open_bench("group.size=1")

    async def refuse(request):
        if request.task_id == "refused":
            raise InvokeRejected("the image is not arm64", reason="container_error")

    behave = only("agent", Agents.fail, only("lost", Agents.lose))
    step = bench.step("done", "agent", "lost", "refused", behave=behave, before=refuse)
    result = await step.run()
    bench.check_ended(result)
    until, closing, seconds = result.report.until_invoke_s, result.report.closing_s, result.report.seconds
    assert 0 <= until <= seconds - closing < seconds
    assert outcomes(step) == {
        "done.0": (Outcome.COMPLETED, ""),
        "agent.0": (Outcome.AGENT_ERROR, "agent_exception"),
        "lost.0": (Outcome.INFRA_ERROR, "agent_exception"),
        "refused.0": (Outcome.INFRA_ERROR, "container_error"),
    }
    sessions: dict[str, list[str]] = {}
    for request in bench.agents.requests:
        sessions.setdefault(request.rollout_id, []).append(request.session_id)
    for record in step.results.records.all():
        assert [*record.session_ids] == sessions[record.rollout_id]
        # A rejection is permanent once it repeats.
        assert record.attempts == (5 if record.rollout_id == "refused.0" else 1)
        assert record.planned_at <= record.invoked_at <= record.settled_at
        assert (record.result_at is None) == (record.rollout_id == "refused.0")
    assert step.results.records.all()[3].message == "the image is not arm64"


async def test_an_aborted_and_a_cancelled_step_have_records(open_bench):
    bench = await open_bench()
    for number, end in enumerate(("abort", "cancel")):
        step = bench.step("task-a", number=number, behave=only("task-a.0", Agents.complete, Agents.hang))
        running = asyncio.create_task(step.run())
        await eventually(
            lambda step=step: step.ledger.counts()[Outcome.COMPLETED] and not step.ledger.phases()["planned"]
        )
        if end == "abort":
            step.early_end.abort(CircuitOpen("too many"))
        else:
            running.cancel()
        with pytest.raises(CircuitOpen if end == "abort" else asyncio.CancelledError):
            await running
        lost = (Outcome.INFRA_ERROR, "run_failed") if end == "abort" else (Outcome.CANCELLED, "aborted")
        assert outcomes(step) == {"task-a.0": (Outcome.COMPLETED, ""), "task-a.1": lost}
        assert set(bench.agents.stopped) == bench.agents.invoked
        step.ledger.reconcile()


async def test_a_resumed_step_has_the_sessions_of_finished_rollouts(open_bench):
    bench = await open_bench("group.size=1")
    [request] = (await bench.run("task-a")).rollouts
    step = bench.step("task-a")
    report = (await step.run()).report
    assert (report.resumed, report.until_invoke_s) == (1, None)
    [record] = step.results.records.all()
    assert (record.outcome, record.attempts, record.session_ids) == (Outcome.COMPLETED, 0, (request.session_id,))


async def test_a_step_without_a_number_gets_none_that_was_used(open_bench, tmp_path):
    """Under a number that was used it would resume that step, and train its results twice."""
    manager = (await open_bench("group.size=1", f"output_dir={tmp_path}")).manager()
    numbers = [(await manager.collect([Task("a", {})], step=step)).step for step in (None, 5, None, 2, None)]
    assert numbers == [0, 5, 6, 2, 7]


async def test_a_step_returns_only_to_a_manager_that_still_has_the_run(open_bench, tmp_path):
    bench = await open_bench("group.size=1", f"output_dir={tmp_path}")
    manager = bench.manager()
    lease = manager._run.lease
    lease.try_to_confirm.side_effect = RunHeld("taken over by another manager")
    lease.mark_lost.side_effect = lambda error: setattr(lease, "lost", error)
    with pytest.raises(RunHeld):
        await manager.collect([Task("a", {})])
    assert isinstance(lease.lost, RunHeld)
    assert not [*tmp_path.rglob("*.rollouts.jsonl")], "the other manager writes them"
