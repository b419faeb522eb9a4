"""A container that writes in the names of others costs them one rollout at most, and none is trained on its word."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from agent_wrapper.contract import Failure, Outcome, Sampling, failure_marker_key
from rollout_backend.core.circuit_breaker import CircuitBreaker
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.tasks import Task, rollout_id
from rollout_backend.errors import CircuitOpen

TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


async def test_a_result_forged_for_another_rollout_is_no_result_and_it_is_replaced(open_bench):
    """The forged object occupies the key for good, so the rollout cannot finish; a further one takes its place."""
    bench = await open_bench("group.size=1", "group.policy=replace")
    forged = asyncio.Event()

    async def behave(agents, request):
        if request.task_id == "hostile":
            for victim in agents.requests:
                if victim.rollout_id == "victim.0":
                    body = agents.result(
                        victim, segments=[], conversations=[{"messages": TALK}], session_id=request.session_id
                    )
                    await agents.put(victim, body.encode())
                    await agents.announce(victim)
            forged.set()
        elif request.rollout_id == "victim.0":
            await asyncio.Event().wait()
        await agents.complete(request)

    async def victim_first(request):
        if request.task_id == "hostile":
            while not any(one.rollout_id == "victim.0" for one in bench.agents.requests):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    bench.agents.before = victim_first
    bench.agents.behave = behave
    result = await bench.step("hostile", "victim").run()
    assert result.report.reasons == {"infra_error: invalid_result": 1}
    [failure] = result.failures
    assert failure.rollout_id == "victim.0"
    assert failure.message.startswith("session_id: is not that of attempt 1 of 'victim.0'")
    assert result.report.replacements == 1
    assert all(group.usable for group in result.groups)
    assert {rollout.rollout_id for rollout in result.rollouts} == {"hostile.0", "victim.1"}
    [record] = await bench.quarantined()
    assert record["what"].endswith("/victim.0")


async def test_failure_markers_forged_for_another_rollout_change_nothing(open_bench):
    bench = await open_bench("group.size=1")

    async def behave(agents, request):
        key = failure_marker_key("", request.run_id, 0, request.rollout_id, request.attempt)
        failure = Failure(reason="terminated", message="boom")
        forged = agents.result(
            request, outcome=Outcome.INFRA_ERROR, reward=None, failure=failure, session_id="made-up"
        )
        await agents.put(request, forged.encode(), key)
        await agents.announce(request, key=key)
        while not await bench.quarantined():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await agents.complete(request)

    bench.agents.behave = behave
    result = await bench.step().run()
    assert result.report.outcomes[Outcome.COMPLETED] == 1
    assert len(await bench.quarantined()) == 1


async def test_refused_results_of_an_earlier_take_do_not_open_the_breaker_again(open_bench):
    bench = await open_bench(
        "circuit_breaker.max_failures=2", "circuit_breaker.min_span_s=0", "group.size=3", "group.min_viable=1"
    )

    async def garbage(agents, request):
        if request.rollout_id.endswith(".2"):
            await asyncio.Event().wait()
        await agents.put(request, b"broken")
        await agents.announce(request)

    bench.agents.behave = garbage
    with pytest.raises(CircuitOpen):
        await bench.step().run()
    bench.services = replace(bench.services, breaker=CircuitBreaker(bench.config.circuit_breaker))
    bench.agents.behave = type(bench.agents).complete
    result = await bench.step().run()
    assert result.report.reasons == {"infra_error: invalid_result": 2}
    assert result.report.outcomes[Outcome.COMPLETED] == 1


def test_no_two_tasks_share_a_rollout_whatever_they_are_called():
    tasks = ("a", "a.g1", "a.0", "a.0.g1", "a.g1.0", "0", "0.0", "g1")
    ids = [rollout_id(*each) for each in itertools.product(tasks, range(12), range(12))]
    assert len(set(ids)) == len(ids)


def test_a_step_planned_again_shares_no_rollout_with_the_one_before():
    def plan(name, payload, before=None):
        tasks = [(Task(name, payload), 2, Sampling())]
        return Manifest.plan("r", 0, tasks, now=0, deadline=1, before=before)

    first = plan("a.g1", {"q": "first"})
    second = plan("a", {"q": "second"}, first)
    third = plan("a.g2", {"q": "third"}, second)
    ids = [each for manifest in (first, second, third) for each in manifest.tasks[0].rollouts]
    assert len(set(ids)) == 6
    assert second.next_rollout("a") == "a.2.g1"
    assert third.next_rollout("a.g2") == "a.g2.2.g2"


def test_session_ids_cannot_be_known_without_the_manifest():
    tasks = [(Task("a", {}), 1, Sampling())]
    one, other = (Manifest.plan("r", 0, tasks, now=0, deadline=1) for _ in range(2))
    assert one.session_id("a.0", 1) != other.session_id("a.0", 1), "the same step of the same run"
    assert len(one.nonce) == 32
