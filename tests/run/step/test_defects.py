"""A request that cannot be signed costs time. A defect in a task of a step ends the step, with that error."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from agent_wrapper.contract import Outcome, ResultUrls
from builders import eventually
from rollout_backend.errors import NoCredentials
from step_bench import Agents, only


def urls_of(claims):
    return ResultUrls(result=f"http://s3/{claims.attempt}", failure_marker="http://s3/m", artifacts="http://s3/a")


async def test_urls_that_cannot_be_signed_cost_time_and_no_attempt(open_bench):
    bench = await open_bench("runtime.max_attempts=2")
    tries = Counter()

    async def urls(claims):
        tries[claims.rollout_id] += 1
        if tries[claims.rollout_id] < 10:
            raise NoCredentials("the provider does not answer")
        return urls_of(claims)

    bench.replace(presigner=SimpleNamespace(urls=urls))
    result = await bench.run()
    assert result.report.outcomes[Outcome.COMPLETED] == result.report.planned == result.report.attempts == 2
    assert {request.result.urls.result for request in bench.agents.requests} == {"http://s3/1"}


@pytest.mark.parametrize("where", ["signing", "invoke", "stop", "accepted", "listing"])
async def test_a_defect_in_a_rollouts_task_ends_the_step_at_once(open_bench, monkeypatch, where):
    times = ("timeouts.collection_s=3600", "timeouts.session_key_s=9000", "collect.list_after_idle_s=0.1")
    bench = await open_bench("group.size=4", "queue.wait_s=0", *times)
    defect = ZeroDivisionError("a defect")

    async def fail(*_):
        raise defect

    async def urls(claims):
        return await fail() if claims.rollout_id.endswith(".3") else urls_of(claims)

    async def before(request):
        if request.rollout_id.endswith(".3"):
            raise defect

    async def fail_at_work(_):
        await eventually(lambda: bench.agents.sessions)
        raise defect

    behave = Agents.hang
    match where:
        case "signing":
            bench.replace(presigner=SimpleNamespace(urls=urls))
        case "invoke":
            bench.agents.before = before
        case "stop":
            bench.agents.stop = fail
            behave = only("task-a.3", Agents.complete, Agents.hang)
        case "accepted":
            monkeypatch.setattr(bench.services.in_flight, "record_running", lambda *_: 1 / 0)
        case "listing":
            monkeypatch.setattr(bench.services.buffer, "sweep", fail_at_work)
    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            await bench.run(behave=behave)
    if where != "stop":
        assert set(bench.agents.stopped) >= set(bench.agents.sessions)
        assert not bench.ledger.open_sessions
    assert bench.ledger.entries["task-a.0"].reason == "run_failed"
