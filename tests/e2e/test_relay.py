"""A whole run whose agents reach only a relay, not a gateway."""

import asyncio

import pytest

from agent_wrapper.contract import Outcome
from relays import KEY, relay_process
from rollout_backend.core.tasks import Task

PATIENT = {"do": "ask patiently"}


@pytest.fixture
async def relay(tmp_path):
    relay = relay_process(tmp_path / "relay.log")
    await relay.start()
    yield relay
    await relay.process.stop()


@pytest.mark.slow
async def test_a_run_through_a_relay(open_run, relay, held, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT__RELAY__KEY", KEY)
    holding, asked = False, asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(prompt: str) -> str:
        if holding:
            loop.call_soon_threadsafe(asked.set)
            held(prompt)  # the connection is gone when it answers
        return "7"

    run = await open_run(f"relay.url=ws://127.0.0.1:{relay.port}", "gateway.processes=2", replies=answer)
    result = await run.manager.collect([Task(f"task-{i}", PATIENT) for i in range(4)])
    assert result.report.balanced
    assert result.report.outcomes[Outcome.COMPLETED] == 8
    urls = {rollout.extras["base_url"] for rollout in result.rollouts}
    assert urls <= {f"{relay.url}/s/0/v1", f"{relay.url}/s/1/v1"}
    assert all(rollout.reward == 1.0 and rollout.segments for rollout in result.rollouts)

    # A relay that restarts in the middle of a step loses no rollout.
    holding = True
    collecting = asyncio.create_task(run.manager.collect([Task("a", PATIENT)]))
    async with asyncio.timeout(120):
        await asked.wait()
    await relay.process.stop()
    holding = False
    relay.process = relay_process(tmp_path / "relay.log", port=relay.port).process
    await relay.start()
    result = await collecting
    assert result.report.outcomes[Outcome.COMPLETED] == 2

    # Nor does a dialer that is killed.
    holding = True
    asked.clear()
    collecting = asyncio.create_task(run.manager.collect([Task("b", PATIENT)]))
    async with asyncio.timeout(120):
        await asked.wait()
    dialer = run.manager._run.serving.dialer
    dialer._process._process.kill()
    holding = False
    result = await collecting
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert dialer.restarts == 1
