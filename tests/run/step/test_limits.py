"""The circuit breaker, blocked tasks, stragglers and spare rollouts bound what a run spends on hopeless work."""

import asyncio
import json

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually, skip
from rollout_backend.core.manifest import payload_digest
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen, InvokeRejected
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from step_bench import Agents, only

# --- the circuit breaker ----------------------------------------------------------------------------------


def opens_after(max_failures: int) -> str:
    return f"circuit_breaker={{max_failures: {max_failures}, min_span_s: 0}}"


async def test_failures_add_up_over_steps_and_a_stopped_run_dispatches_nothing(open_bench):
    bench = await open_bench(opens_after(4))

    async def refuse(request):
        raise InvokeRejected("who are you?", reason="access_denied")

    assert (await bench.run(before=refuse)).report.reasons == {"infra_error: access_denied": 2}
    diagnosis = r"4 rollouts.*access_denied.*who are you.*the agents' log.*TrainerPolicyArn"
    with pytest.raises(CircuitOpen, match=diagnosis):
        await bench.run(number=1)
    bench.forget()
    with pytest.raises(CircuitOpen):
        await bench.run(number=2)
    assert bench.agents.requests == []


async def test_every_step_of_the_run_is_stopped(open_bench, tmp_path):
    bench = await open_bench(opens_after(2), f"output_dir={tmp_path}")
    other_runs = asyncio.Event()

    async def refuse_a(request):
        if request.task_id == "task-b":
            other_runs.set()
        else:
            await other_runs.wait()
            raise InvokeRejected("404", reason="runtime_not_found")

    bench.agents.before, bench.agents.behave = refuse_a, Agents.hang
    manager = bench.manager()
    steps = [manager.collect([Task("task-a", {})]), manager.collect([Task("task-b", {})])]
    ended = await asyncio.gather(*steps, return_exceptions=True)
    assert [type(each) for each in ended] == [CircuitOpen, CircuitOpen]
    assert "runtime.arn" in str(ended[1])
    assert set(bench.agents.sessions) <= set(bench.agents.stopped)


async def test_the_agents_of_a_cancelled_step_run_no_more(open_bench):
    bench = await open_bench(opens_after(2), "group.min_viable=1")
    cancelled = bench.start("task-a", "task-b", behave=Agents.hang)
    await eventually(lambda: bench.services.breaker._running == {0: 4})
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    with pytest.raises(CircuitOpen):
        await bench.run(number=1, behave=Agents.lose)


async def test_results_refused_before_a_restart_do_not_open_the_breaker_again(open_bench):
    bench = await open_bench(opens_after(2), "group.size=3", "group.min_viable=1")

    async def garbage(agents, request):
        await agents.put(request, b"broken")
        await agents.announce(request)

    with pytest.raises(CircuitOpen):
        await bench.run(behave=only("task-a.2", Agents.hang, garbage))
    bench.replace(breaker=CircuitBreaker(bench.config.circuit_breaker))
    report = (await bench.run(behave=Agents.complete)).report
    assert report.reasons == {"infra_error: invalid_result": 2}
    assert report.outcomes[Outcome.COMPLETED] == 1


# --- blocked tasks ---------------------------------------------------------------------------------------


def restart(bench) -> None:
    """Replace what the trainer's process knows. What S3 holds stays."""
    bench.forget()
    store, after = bench.services.blocklist._store, bench.config.group.block_task_after
    bench.replace(blocklist=TaskBlocklist(store, bench.config.run_id, after))


async def blocklist(bench) -> list:
    return await bench.objects(f"runs/{bench.config.run_id}/task-blocklist/")


async def test_a_repeatedly_lost_task_is_no_longer_dispatched(open_bench):
    bench = await open_bench("group.block_task_after=2", "group.min_viable=1")
    for number in range(2):
        named = {"trainer_name": f"{number} of verl"}
        result = await bench.run("a", "b", number=number, behave=only("b", Agents.lose), **named)
        assert result.report.outcomes[Outcome.INFRA_ERROR] == 2
    restart(bench)
    result = await bench.run("b", "a", number=2)
    assert {request.task_id for request in bench.agents.requests} == {"a"}
    assert result.report.reasons == {"infra_error: task_blocked": 2}
    assert [group.usable for group in result.groups] == [False, True]
    digest = payload_digest(Task("b", {"q": "b"}))
    [record] = await blocklist(bench)
    assert (record["digest"], record["task_id"]) == (digest, "b")
    assert [loss["step"] for loss in record["losses"]] == [0, 1]
    [first, _] = record["losses"][0]["failures"]
    assert (first["reason"], first["message"]) == ("agent_exception", "boom")
    assert first["session_id"]
    assert f"{digest}.json" in result.failures[0].message
    assert "last in step 1 of verl: " in result.failures[0].message


async def test_restarts_of_one_step_count_and_a_blocked_task_does_not_block_a_resume(open_bench):
    bench = await open_bench("group.block_task_after=2", "group.policy=replace", "group.max_replacements=1")
    for _ in range(3):
        restart(bench)
        result = await bench.run("a", "b", behave=only("b", Agents.lose))
    assert bench.agents.requests == []
    # Two losses at once leave the group beyond one replacement, so none was planned; one by one, one was.
    assert set(result.report.reasons) == {"infra_error: task_blocked"}
    assert result.report.reasons["infra_error: task_blocked"] == 2 + result.report.replacements


async def test_one_delivered_rollout_resets_the_count_of_losses(open_bench):
    bench = await open_bench("group.block_task_after=2", "group.min_viable=1")
    for number in range(6):
        lost = "b.0" if number % 2 else "b"
        result = await bench.run("a", "b", number=number, behave=only(lost, Agents.lose))
        assert "infra_error: task_blocked" not in result.report.reasons
    [record] = await blocklist(bench)
    assert record["losses"] == []


async def test_a_loss_of_all_tasks_blocks_none(open_bench):
    bench = await open_bench("group.block_task_after=1", "circuit_breaker.max_failures=null")
    for number in range(3):
        await bench.run("a", "b", number=number, behave=Agents.lose)
    assert len(bench.agents.requests) == 12
    assert await blocklist(bench) == []


async def test_an_unreadable_record_blocks_no_task(open_bench):
    bench = await open_bench("group.block_task_after=1")
    name = f"{payload_digest(Task('a', {'q': 'a'}))}.json"
    await bench.put(f"runs/{bench.config.run_id}/task-blocklist/{name}", json.dumps({"schema_version": 9}).encode())
    assert (await bench.run("a")).report.outcomes[Outcome.COMPLETED] == 2


# --- stragglers -------------------------------------------------------------------------------------------


async def test_a_straggler_is_cut_off(open_bench):
    bench = await open_bench("group.size=4", "group.straggler_after=0.7", "group.straggler_factor=3")
    result = await bench.run(behave=only("task-a.2", Agents.vanish))
    assert result.report.reasons == {"timed_out: straggler": 1}
    assert "group.straggler_factor" in result.failures[0].message
    bias = result.report.length_bias
    assert (bias.finished.rollouts, bias.finished.mean_sampled_tokens, bias.finished.mean_turns) == (3, 2.0, 1.0)
    assert (bias.cut_off.rollouts, bias.cut_off.mean_sampled_tokens) == (1, None)
    assert bias.cut_off.mean_s > bias.finished.mean_s
    assert bias.reason == "straggler"


async def test_no_rollout_is_a_straggler_before_enough_are_finished(open_bench):
    bench = await open_bench("group.size=4", "group.straggler_after=0.8")
    step = bench.step(behave=only("task-a.2", Agents.vanish))
    running = asyncio.create_task(step.run())
    await eventually(lambda: step.ledger.counts()[Outcome.COMPLETED] == 3)
    skip(30)  # much longer than the others took
    step._changed.set()
    await eventually(lambda: running.done() or not step._changed.is_set())  # it has looked for late rollouts
    seen = step.ledger.open, len(step._absence_check._pending)
    skip(51)  # the timeouts of an agent and of its publication
    assert ((await running).report.reasons, seen) == ({"timed_out: no_result": 1}, (1, 0))


# --- spare rollouts ---------------------------------------------------------------------------------------


async def test_an_oversampled_group_is_complete_without_its_slowest(open_bench):
    bench = await open_bench("group.size=2", "group.oversample=2", "group.policy=strict")
    slow = only("task-a.0", Agents.vanish, only("task-b.3", Agents.vanish))
    result = await bench.run("task-a", "task-b", behave=slow)
    assert result.report.planned == 8
    assert [len(group.rollouts) for group in result.groups] == [2, 2]
    assert all(group.usable for group in result.groups)
    ended = result.report.outcomes
    assert ended[Outcome.CANCELLED] >= 2
    assert ended[Outcome.COMPLETED] + ended[Outcome.CANCELLED] == 8
    assert result.report.surplus == ended[Outcome.COMPLETED] - 4
    assert result.report.length_bias.cut_off.rollouts == ended[Outcome.CANCELLED]
    assert set(bench.agents.stopped) == bench.agents.invoked


async def test_a_spare_rollout_compensates_for_a_lost_one(open_bench):
    bench = await open_bench("group.size=2", "group.oversample=1", "group.policy=strict")
    result = await bench.run(behave=only("task-a.1", Agents.lose))
    assert [rollout.rollout_id for rollout in result.groups[0].rollouts] == ["task-a.0", "task-a.2"]
    assert result.groups[0].usable
