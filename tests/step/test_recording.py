"""A step while S3 refuses requests for its manifest: what waits, what continues, and in which order writes land."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tenacity import wait_none

from agent_wrapper.contract import Failure, Outcome
from rollout_backend.core.manifest import Manifest
from rollout_backend.errors import CircuitOpen, CredentialsExpired, StoreError
from rollout_backend.local.fault_proxy import Fault, FaultProxy, Rule
from rollout_backend.step import plan as plan_module

REPLACING = "group.policy=replace"
LOST = Failure(reason="terminated", message="its container was told to stop")


@pytest.fixture
async def proxy(local_aws) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(local_aws.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Between our own tries; the SDK makes its own."""
    monkeypatch.setattr(plan_module, "_BACK_OFF", wait_none())


def no_manifests(operation: str) -> Rule:
    return Rule(operation, Fault.FAIL, status=503, code="SlowDown", path="*/manifests/*")


async def lose_the_first(agents, request) -> None:
    """The first rollout is lost to the infrastructure; all others complete."""
    if request.rollout_id == "a.0":
        await agents.complete(request, outcome=Outcome.INFRA_ERROR, reward=None, segments=(), failure=LOST)
    else:
        await agents.complete(request)


@pytest.mark.parametrize("operation", ["s3:GetObject", "s3:PutObject"])
async def test_a_refusal_at_the_start_delays_the_step_and_nothing_is_dispatched_before(open_bench, proxy, operation):
    bench = await open_bench(f"aws.endpoint_url={proxy.url}")
    rule = no_manifests(operation)
    proxy.rules.append(rule)
    step = bench.step("a")
    running = asyncio.create_task(step.run())
    while rule.hits < 5:  # noqa: ASYNC110  # more than the SDK's own tries
        await asyncio.sleep(0.02)
    assert bench.agents.requests == []
    assert not running.done()
    proxy.rules.clear()
    result = await running
    assert result.report.outcomes[Outcome.COMPLETED] == 2


async def test_a_refusal_during_a_replacement_holds_up_the_replacement_alone(open_bench, proxy):
    bench = await open_bench(REPLACING, f"aws.endpoint_url={proxy.url}")
    rule, go = no_manifests("s3:PutObject"), asyncio.Event()

    async def behave(agents, request):
        if request.rollout_id == "b.0":
            await go.wait()
        proxy.rules[:] = [rule] if not go.is_set() else proxy.rules
        await lose_the_first(agents, request)

    bench.agents.behave = behave
    step = bench.step("a", "b")
    running = asyncio.create_task(step.run())
    while rule.hits < 5:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    go.set()
    while step.ledger.entries["b.0"].outcome is None:  # noqa: ASYNC110  # it is settled while S3 still refuses
        await asyncio.sleep(0.02)
    assert "a.2" not in [request.rollout_id for request in bench.agents.requests]
    proxy.rules.clear()
    result = await running
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert result.report.replacements == 1


async def test_an_older_state_never_lands_last(open_bench):
    bench = await open_bench(REPLACING, "group.size=4")
    began: list[Manifest] = []
    landed: list[Manifest] = []
    writing = 0

    async def write(manifest: Manifest) -> None:
        nonlocal writing
        writing += 1
        assert writing == 1, "two writes of one manifest at the same time"
        began.append(manifest)
        await asyncio.sleep(0)
        landed.append(manifest)
        writing -= 1

    async def lose_the_planned(agents, request):
        if int(request.rollout_id.partition(".")[2]) < 2:
            await agents.complete(request, outcome=Outcome.INFRA_ERROR, reward=None, segments=(), failure=LOST)
        else:
            await agents.complete(request)

    bench.agents.behave = lose_the_planned
    bench.services = replace(bench.services, write_manifest=write)
    result = await bench.step("a").run()
    assert result.report.replacements == 2
    assert [len(manifest.tasks[0].rollouts) for manifest in landed] == sorted(
        len(manifest.tasks[0].rollouts) for manifest in landed
    )
    assert landed == began
    assert len(landed[-1].tasks[0].rollouts) == 6


async def test_what_s3_refuses_until_the_deadline_ends_the_step_and_nothing_was_dispatched(open_bench):
    times = ("agent_s=0.3", "publish_grace_s=0.1", "model_call_s=0.1", "collection_s=0.5")
    bench = await open_bench(*(f"timeouts.{each}" for each in times))
    tries = 0

    async def write(manifest: Manifest) -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0.01)
        raise StoreError("503 SlowDown")

    bench.services = replace(bench.services, write_manifest=write)
    with pytest.raises(StoreError, match="503 SlowDown"):
        await bench.step("a").run()
    assert tries > 4
    assert bench.agents.requests == []


async def test_an_abort_does_not_wait_for_s3(open_bench):
    bench = await open_bench()
    asked = asyncio.Event()

    async def read(step: int) -> None:
        asked.set()
        await asyncio.sleep(0.01)
        raise StoreError("503 SlowDown")

    bench.services = replace(bench.services, read_manifest=read)
    step = bench.step("a")
    running = asyncio.create_task(step.run())
    await asked.wait()
    step.abort(CircuitOpen("enough"))
    async with asyncio.timeout(5):
        with pytest.raises(CircuitOpen):
            await running


async def test_credentials_that_expire_during_a_replacement_end_the_step(open_bench):
    bench = await open_bench(REPLACING)
    write = bench.services.write_manifest

    async def expired(manifest: Manifest) -> None:
        if len(manifest.tasks[0].rollouts) > 2:
            raise CredentialsExpired("get new ones")
        await write(manifest)

    async def behave(agents, request):
        if request.rollout_id == "a.0":
            await lose_the_first(agents, request)

    bench.agents.behave = behave
    bench.services = replace(bench.services, write_manifest=expired)
    with pytest.raises(CredentialsExpired):
        await bench.step("a").run()
    assert not bench.agents.sessions
