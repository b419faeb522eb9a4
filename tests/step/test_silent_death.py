"""Containers that die silently, in a step: what it concludes from missing heartbeats."""

from itertools import count

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually, skip
from rollout_backend.core.ledger import Phase
from rollout_backend.core.session_ends import HeartbeatReport, Heartbeats
from step_bench import Agents, only


class Ward:
    """Watches a bench's sessions, in virtual time."""

    def __init__(self, bench) -> None:
        self._bench = bench
        self._heartbeats = Heartbeats(15.0)
        self._heartbeats.poll_s = 0.01  # of the step; the heartbeats' time is ours
        self._now = (3.0 * n for n in count())
        self._heartbeats.watch("another")
        bench.replace(heartbeats=self._heartbeats)

    def _hear(self, *sessions: str) -> None:
        self._heartbeats.observe(next(self._now), [HeartbeatReport(frozenset({"another", *sessions}))])

    async def fall_silent(self, agents, request) -> None:
        """Let time pass in which only another session is heard."""
        entry = self._bench.ledger.entries[request.rollout_id]
        await eventually(lambda: (entry.phase, entry.session_id) == (Phase.RUNNING, request.session_id))
        self._hear(request.session_id)
        self._heartbeats.poll_s = 15.0
        for _ in range(20):
            self._hear()
        self._heartbeats.poll_s = 0.01


async def test_a_lost_attempt_is_stopped_and_the_next_one_made(open_bench):
    bench = await open_bench()
    ward = Ward(bench)

    async def the_first_dies(agents, request):
        await (ward.fall_silent(agents, request) if request.attempt == 1 else agents.complete(request))

    result = await bench.run(behave=only("task-a.1", the_first_dies))
    assert (result.report.outcomes[Outcome.COMPLETED], result.report.attempts) == (2, 3)
    attempts = {r.attempt: r.session_id for r in bench.agents.requests if r.rollout_id == "task-a.1"}
    assert list(attempts) == [1, 2]
    assert bench.agents.stopped.count(attempts[1]) == 1
    assert attempts[1] in bench.revoked
    assert bench.services.heartbeats._watched == {"another"}


@pytest.mark.parametrize("policy", ["min_viable", "replace"])
async def test_a_rollout_whose_every_attempt_is_lost_is_infra_error(open_bench, policy):
    bench = await open_bench("runtime.max_attempts=2", f"group.policy={policy}", "group.min_viable=1")
    result = await bench.run(behave=only("task-a.1", Ward(bench).fall_silent))
    assert result.report.reasons == {"infra_error: container_lost": 1}
    [failure] = result.failures
    assert "fell silent while others were heard" in failure.message
    assert result.report.attempts == 3 + (policy == "replace")
    assert result.report.outcomes[Outcome.COMPLETED] == 1 + (policy == "replace")


async def test_a_result_in_s3_counts_although_its_container_died(open_bench):
    bench = await open_bench()
    ward = Ward(bench)

    async def dies_after_its_write(agents, request):
        await agents.write_unannounced(request)
        await ward.fall_silent(agents, request)

    report = (await bench.run(behave=dies_after_its_write)).report
    assert (report.outcomes[Outcome.COMPLETED], report.attempts) == (2, 2)


async def test_a_rollout_without_a_result_is_replaced(open_bench):
    # `skip` may cut off the request that receives an announcement, so results are found by listing.
    bench = await open_bench("group.policy=replace", "group.max_replacements=1", "collect.list_after_idle_s=0.3")
    running = bench.start(behave=only("task-a.0", Agents.vanish))
    await eventually(lambda: bench.ledger.counts()[Outcome.COMPLETED] == 1)
    skip(81)  # the timeouts of an agent and of its publication
    report = (await running).report
    assert report.reasons == {"timed_out: no_result": 1}
    assert report.outcomes[Outcome.COMPLETED] == 2
