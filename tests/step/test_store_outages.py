"""A step while S3 does not answer: what it could not be asked for is not taken for absent."""

from __future__ import annotations

import asyncio

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.local.fault_proxy import Fault, FaultProxy, Rule

REFUSED = Rule("s3:GetObject", Fault.FAIL, code="SlowDown", path="*/steps/*")
SOON = ("timeouts.model_call_s=0.1", "timeouts.agent_s=0.5", "timeouts.publish_grace_s=0.5")


@pytest.fixture
async def proxy(local_aws):
    async with FaultProxy(local_aws.endpoint_url) as proxy:
        yield proxy


async def unannounced(agents, request):
    await agents.put(request, agents.result(request).encode())


async def until(condition):
    async with asyncio.timeout(25):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("refused", ["s3:GetObject", "s3:*"])
async def test_what_s3_was_not_asked_for_stays_open_until_it_answers(open_bench, proxy, refused):
    bench = await open_bench(f"aws.endpoint_url={proxy.url}", *SOON)
    bench.agents.behave = unannounced
    step = bench.step("task-a", "task-b")
    running = asyncio.create_task(step.run())
    await until(lambda: bench.agents.finished == 4)
    proxy.rules = [Rule(refused, Fault.FAIL, code="SlowDown", path="*")]
    await until(lambda: proxy.count("s3:GetObject", Fault.FAIL) >= 16)  # each of the four, with the SDK's own retries
    assert len(list(step.ledger.open_entries())) == 4
    proxy.rules = []
    result = await running
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert not result.report.deadline_reached


async def test_a_straggler_is_not_cut_off_before_s3_has_answered(open_bench, proxy):
    bench = await open_bench(
        f"aws.endpoint_url={proxy.url}", "group.straggler_after=0.5", "group.straggler_factor=1.0"
    )

    async def first_announced(agents, request):
        await (agents.complete(request) if request.rollout_id.endswith(".0") else unannounced(agents, request))

    bench.agents.behave = first_announced
    proxy.rules = [Rule("s3:GetObject", Fault.FAIL, code="SlowDown", path="*/task-a.1")]
    step = bench.step("task-a")
    running = asyncio.create_task(step.run())
    await until(lambda: proxy.count("s3:GetObject", Fault.FAIL) >= 5)
    assert [entry.planned.rollout_id for entry in step.ledger.open_entries()] == ["task-a.1"]
    proxy.rules = []
    assert (await running).report.outcomes[Outcome.COMPLETED] == 2


async def test_at_the_steps_deadline_what_is_unknown_is_reported_as_that(open_bench, proxy):
    bench = await open_bench(f"aws.endpoint_url={proxy.url}", *SOON, "timeouts.collection_s=2")

    async def one_vanishes(agents, request):
        await (agents.vanish(request) if request.rollout_id == "task-a.0" else unannounced(agents, request))

    bench.agents.behave = one_vanishes
    proxy.rules = [REFUSED]
    result = await bench.step("task-a").run()
    assert result.report.balanced
    assert result.report.reasons == {"timed_out: store_unavailable": 2}
    assert "S3 could not be asked" in result.failures[0].message


async def test_while_listings_fail_results_are_requested_by_their_keys(open_bench, proxy):
    bench = await open_bench(
        f"aws.endpoint_url={proxy.url}", *SOON, "group.size=60", "group.min_viable=1", "queue.enabled=false",
    )  # fmt: skip
    bench.agents.behave = unannounced

    async def no_listings(request):  # from the first dispatch on
        proxy.rules = [Rule("s3:ListObjects", Fault.FAIL, code="SlowDown")]

    bench.agents.before = no_listings
    result = await bench.step("task-a").run()
    assert result.report.outcomes[Outcome.COMPLETED] == 60
