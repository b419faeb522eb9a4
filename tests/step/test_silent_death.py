"""Containers that die silently, in a step: what it concludes from missing heartbeats."""

from itertools import count

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually
from rollout_backend.core.ledger import Phase
from rollout_backend.core.session_ends import HeartbeatReport, Heartbeats
from step_bench import only


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
