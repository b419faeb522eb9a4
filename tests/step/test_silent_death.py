"""Containers that die silently, in a step: what the heartbeats make of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.heartbeats import HeartbeatReport, Heartbeats


class Ward:
    """Watches a bench's sessions. `fall_silent` lets time pass in which only another session is heard."""

    def __init__(self, bench) -> None:
        self._heartbeats = Heartbeats(15.0)
        self._heartbeats.poll_s = 0.01  # of the step; time is ours
        self._now = (3.0 * n for n in count())
        self._heartbeats.watch("another")
        bench.services = replace(bench.services, heartbeats=self._heartbeats)

    def hear(self, *sessions: str) -> None:
        self._heartbeats.observe(next(self._now), [HeartbeatReport(frozenset({"another", *sessions}))])

    def fall_silent(self, *sessions: str) -> None:
        self.hear(*sessions)
        self._heartbeats.poll_s = 15.0
        for _ in range(20):
            self.hear()
        self._heartbeats.poll_s = 0.01


async def test_a_lost_attempt_is_stopped_and_the_next_one_made(open_bench):
    bench = await open_bench()
    ward = Ward(bench)
    dead = []

    async def the_first_dies(agents, request):
        if request.rollout_id == "task-a.1" and not dead:
            dead.append(request.session_id)
            await asyncio.sleep(0.2)  # until it is booked as accepted
            ward.fall_silent(request.session_id)
            return
        await agents.complete(request)

    bench.agents.behave = the_first_dies
    step = bench.step("task-a")
    result = await step.run()
    assert result.report.balanced
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert result.report.attempts == 3
    assert bench.agents.stopped.count(dead[0]) == 1
    assert dead[0] in bench.revoked
    attempts = [r.attempt for r in bench.agents.requests if r.rollout_id == "task-a.1"]
    assert attempts == [1, 2]
    assert bench.services.heartbeats._watched == {"another"}


@pytest.mark.parametrize("policy", ["min_viable", "replace"])
async def test_a_rollout_whose_every_attempt_is_lost_is_infra_error(open_bench, policy):
    bench = await open_bench("runtime.max_attempts=2", f"group.policy={policy}", "group.min_viable=1")
    ward = Ward(bench)

    async def one_always_dies(agents, request):
        if request.rollout_id != "task-a.1":
            await agents.complete(request)
            return
        await asyncio.sleep(0.2)
        ward.fall_silent(request.session_id)

    bench.agents.behave = one_always_dies
    result = await bench.step("task-a").run()
    assert result.report.reasons == {"infra_error: container_lost": 1}
    [failure] = result.failures
    assert "fell silent while others were heard" in failure.message
    assert result.report.attempts == 3 + (policy == "replace")
    assert result.report.outcomes[Outcome.COMPLETED] == 1 + (policy == "replace")


async def test_a_result_that_stands_in_s3_is_taken_before_its_container_is_given_up(open_bench):
    bench = await open_bench()
    ward = Ward(bench)

    async def dies_once_it_has_written(agents, request):
        await asyncio.sleep(0.2)
        await agents.put(request, agents.result(request).encode())
        ward.fall_silent(request.session_id)

    bench.agents.behave = dies_once_it_has_written
    result = await bench.step("task-a").run()
    assert (result.report.outcomes[Outcome.COMPLETED], result.report.attempts) == (2, 2)


async def test_a_rollout_without_a_result_is_replaced(open_bench):
    bench = await open_bench(
        "timeouts.model_call_s=0.1", "timeouts.agent_s=0.5", "timeouts.publish_grace_s=0.5", "group.policy=replace",
        "group.max_replacements=1",
    )  # fmt: skip

    async def one_vanishes(agents, request):
        if request.rollout_id != "task-a.0":
            await agents.complete(request)

    bench.agents.behave = one_vanishes
    result = await bench.step("task-a").run()
    assert result.report.reasons == {"timed_out: no_result": 1}
    assert result.report.outcomes[Outcome.COMPLETED] == 2
