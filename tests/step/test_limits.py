"""What a run spends on what cannot succeed: the circuit breaker, blocked tasks, stragglers, rollouts to spare."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.manifest import payload_digest
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen, InvokeRejected
from rollout_backend.manager import RolloutManager
from rollout_backend.run_lease import RunLease
from rollout_backend.step.task_blocklist import TaskBlocklist


async def lose(agents, request):
    await agents.fail(request, Outcome.INFRA_ERROR)


# --- the circuit breaker ----------------------------------------------------------------------------------


async def test_failures_of_one_kind_stop_the_step_with_a_diagnosis_and_close_what_runs(open_bench):
    bench = await open_bench(
        "circuit_breaker.max_failures=3", "circuit_breaker.min_span_s=0", "group.size=4", "group.min_viable=1"
    )

    async def all_but_the_last(request):
        if not request.rollout_id.endswith(".3"):
            raise InvokeRejected("exec format error", reason="container_error")

    async def hang(agents, request):
        await asyncio.Event().wait()

    bench.agents.before, bench.agents.behave = all_but_the_last, hang
    step = bench.step()
    with pytest.raises(CircuitOpen, match=r"3 rollouts.*container_error.*exec format error.*127\.0\.0\.1.*arm64"):
        await step.run()
    step.ledger.reconcile()
    assert step.ledger.entries["task-a.3"].reason == "run_failed"
    assert set(bench.agents.stopped) == {request.session_id for request in bench.agents.requests}


async def test_failures_add_up_over_steps_and_a_stopped_run_dispatches_nothing(open_bench):
    bench = await open_bench("circuit_breaker.max_failures=4", "circuit_breaker.min_span_s=0")

    async def refuse(request):
        raise InvokeRejected("who are you?", reason="access_denied")

    bench.agents.before = refuse
    first = await bench.step(number=0).run()
    assert first.report.reasons == {"infra_error: access_denied": 2}
    with pytest.raises(CircuitOpen, match="TrainerPolicyArn"):
        await bench.step(number=1).run()
    bench.agents.requests.clear()
    with pytest.raises(CircuitOpen):
        await bench.step(number=2).run()
    assert bench.agents.requests == []


async def test_one_success_begins_the_count_anew(open_bench):
    bench = await open_bench("circuit_breaker.max_failures=3", "circuit_breaker.min_span_s=0", "group.min_viable=1")

    async def every_second(agents, request):
        await (agents.complete(request) if request.rollout_id.endswith(".0") else lose(agents, request))

    bench.agents.behave = every_second
    for number in range(4):
        result = await bench.step(number=number).run()
        assert result.report.outcomes[Outcome.INFRA_ERROR] == 1


async def test_every_step_of_the_run_is_stopped(open_bench, tmp_path):
    bench = await open_bench(
        "circuit_breaker.max_failures=2", "circuit_breaker.min_span_s=0", f"output_dir={tmp_path}"
    )
    beside = asyncio.Event()

    async def refuse_a(request):
        if request.task_id == "task-b":
            beside.set()
        else:
            await beside.wait()
            raise InvokeRejected("404", reason="runtime_not_found")

    async def hang(agents, request):
        await asyncio.Event().wait()

    bench.agents.before, bench.agents.behave = refuse_a, hang
    manager = RolloutManager(bench.config)
    manager._run = SimpleNamespace(
        for_steps=bench.services,
        lease=create_autospec(RunLease, instance=True),
        limits=bench.config.runtime,
        background=[],
    )
    steps = [manager.collect([Task("task-a", {})]), manager.collect([Task("task-b", {})])]
    ended = await asyncio.gather(*steps, return_exceptions=True)
    assert [type(each) for each in ended] == [CircuitOpen, CircuitOpen]
    assert "runtime.arn" in str(ended[1])
    assert set(bench.agents.sessions) <= set(bench.agents.stopped)


# --- blocked tasks ---------------------------------------------------------------------------------------


async def lose_b(agents, request):
    await (lose(agents, request) if request.task_id == "b" else agents.complete(request))


def started_again(bench, after=2):
    """The same run in another process: it knows what stands in S3."""
    store = bench.services.blocklist._store
    return dataclasses.replace(bench.services, blocklist=TaskBlocklist(store, bench.config.run_id, after))


async def test_a_task_that_is_lost_again_and_again_is_not_dispatched_any_more(open_bench):
    bench = await open_bench("group.block_task_after=2", "group.min_viable=1")
    bench.agents.behave = lose_b
    for number in range(2):
        assert (await bench.step("a", "b", number=number).run()).report.outcomes[Outcome.INFRA_ERROR] == 2
    bench.agents.requests.clear()
    bench.services = started_again(bench)
    result = await bench.step("b", "a", number=2).run()
    assert {request.task_id for request in bench.agents.requests} == {"a"}
    assert result.report.reasons == {"infra_error: task_blocked": 2}
    assert [group.usable for group in result.groups] == [False, True]
    digest = payload_digest(Task("b", {"q": "b"}))
    [record] = await bench.objects(f"runs/{bench.config.run_id}/task-blocklist/")
    assert (record["digest"], record["task_id"]) == (digest, "b")
    assert [loss["step"] for loss in record["losses"]] == [0, 1]
    [first, _] = record["losses"][0]["failures"]
    assert (first["reason"], first["message"]) == ("agent_exception", "boom")
    assert first["session_id"]
    assert f"{digest}.json" in result.failures[0].message


async def test_takes_of_one_step_count_and_a_resume_is_not_wedged(open_bench):
    bench = await open_bench("group.block_task_after=2", "group.policy=replace", "group.max_replacements=1")
    bench.agents.behave = lose_b
    for _ in range(2):
        bench.services = started_again(bench)
        await bench.step("a", "b").run()
    bench.agents.requests.clear()
    bench.services = started_again(bench)
    result = await bench.step("a", "b").run()
    assert bench.agents.requests == []
    # Two losses at once leave the group beyond one replacement, so none was planned; one by one, one was.
    assert set(result.report.reasons) == {"infra_error: task_blocked"}
    assert result.report.reasons["infra_error: task_blocked"] == 2 + result.report.replacements


async def test_one_rollout_that_gets_through_ends_the_row(open_bench):
    bench = await open_bench("group.block_task_after=2", "group.min_viable=1")
    losing = True

    async def behave(agents, request):
        lost = request.task_id == "b" and (losing or request.rollout_id.endswith(".0"))
        await (lose(agents, request) if lost else agents.complete(request))

    bench.agents.behave = behave
    for number in range(6):
        losing = number % 2 == 0
        result = await bench.step("a", "b", number=number).run()
        assert "infra_error: task_blocked" not in result.report.reasons
    [record] = await bench.objects(f"runs/{bench.config.run_id}/task-blocklist/")
    assert record["losses"] == []


async def test_what_is_lost_with_all_others_is_not_the_tasks_own_fault(open_bench):
    bench = await open_bench("group.block_task_after=1", "circuit_breaker.max_failures=null")
    bench.agents.behave = lose
    for number in range(3):
        await bench.step("a", "b", number=number).run()
    assert len(bench.agents.requests) == 12
    assert await bench.objects(f"runs/{bench.config.run_id}/task-blocklist/") == []


async def test_a_record_that_nobody_can_read_sets_nothing_aside(open_bench):
    bench = await open_bench("group.block_task_after=1")
    key = f"runs/{bench.config.run_id}/task-blocklist/{payload_digest(Task('a', {'q': 'a'}))}.json"
    body = json.dumps({"schema_version": 9}).encode()
    await bench.agents.s3.put_object(Bucket=bench.config.storage.bucket, Key=key, Body=body)
    assert (await bench.step("a").run()).report.outcomes[Outcome.COMPLETED] == 2


# --- stragglers -------------------------------------------------------------------------------------------


async def test_who_takes_much_longer_than_the_others_is_cut_off(open_bench):
    bench = await open_bench("group.size=4", "group.straggler_after=0.7", "group.straggler_factor=3")

    async def behave(agents, request):
        await (agents.vanish(request) if request.rollout_id == "task-a.2" else agents.complete(request))

    bench.agents.behave = behave
    result = await bench.step().run()
    assert result.report.reasons == {"timed_out: straggler": 1}
    assert "group.straggler_factor" in result.failures[0].message
    assert result.report.balanced
    bias = result.report.length_bias
    assert (bias.finished.rollouts, bias.finished.mean_sampled_tokens, bias.finished.mean_turns) == (3, 2.0, 1.0)
    assert (bias.cut_off.rollouts, bias.cut_off.mean_sampled_tokens) == (1, None)
    assert bias.cut_off.mean_s > bias.finished.mean_s


async def test_before_a_straggler_is_cut_off_s3_is_asked(open_bench):
    bench = await open_bench("group.size=4", "group.straggler_after=0.7")

    async def behave(agents, request):
        if request.rollout_id == "task-a.2":
            await agents.put(request, agents.result(request).encode())  # and its announcement is lost
        else:
            await agents.complete(request)

    bench.agents.behave = behave
    result = await bench.step().run()
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert result.report.length_bias is None


async def test_nobody_is_a_straggler_before_enough_are_finished(open_bench):
    bench = await open_bench("group.size=4", "group.straggler_after=0.8", "timeouts.model_call_s=0.1",
        "timeouts.agent_s=0.7", "timeouts.publish_grace_s=0.3")  # fmt: skip

    async def behave(agents, request):
        await (agents.vanish(request) if request.rollout_id == "task-a.2" else agents.complete(request))

    bench.agents.behave = behave
    result = await bench.step().run()
    assert result.report.reasons == {"timed_out: no_result": 1}


async def test_with_some_to_spare_a_group_is_complete_without_its_slowest(open_bench):
    bench = await open_bench("group.size=2", "group.oversample=2", "group.policy=strict")

    async def behave(agents, request):
        slow = request.rollout_id in ("task-a.0", "task-b.3")
        await (agents.vanish(request) if slow else agents.complete(request))

    bench.agents.behave = behave
    result = await bench.step("task-a", "task-b").run()
    assert result.report.planned == 8
    assert [len(group.rollouts) for group in result.groups] == [2, 2]
    assert all(group.usable for group in result.groups)
    ended = result.report.outcomes
    assert ended[Outcome.CANCELLED] >= 2
    assert ended[Outcome.COMPLETED] + ended[Outcome.CANCELLED] == 8
    assert result.report.surplus == ended[Outcome.COMPLETED] - 4
    assert result.report.length_bias.cut_off.rollouts == ended[Outcome.CANCELLED]
    assert set(bench.agents.stopped) == {request.session_id for request in bench.agents.requests}


async def test_no_more_than_its_size_is_trained_of_a_group(open_bench):
    bench = await open_bench("group.size=2", "group.oversample=2")
    bench.agents.behave = type(bench.agents).vanish
    running = asyncio.create_task(bench.step().run())
    async with asyncio.timeout(10):
        while len(bench.agents.requests) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for request in bench.agents.requests:  # all four were done before their sessions were closed
        await bench.agents.put(request, bench.agents.result(request).encode())
    result = await bench.step().run()
    assert result.report.resumed == 4
    assert len(result.groups[0].rollouts) == 2
    assert (result.report.trainable, result.report.surplus) == (4, 2)


async def test_what_is_to_spare_makes_up_for_what_is_lost(open_bench):
    bench = await open_bench("group.size=2", "group.oversample=1", "group.policy=strict")

    async def behave(agents, request):
        await (lose(agents, request) if request.rollout_id == "task-a.1" else agents.complete(request))

    bench.agents.behave = behave
    result = await bench.step().run()
    assert [rollout.rollout_id for rollout in result.groups[0].rollouts] == ["task-a.0", "task-a.2"]
    assert result.groups[0].usable
