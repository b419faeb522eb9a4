"""A whole run whose agents reach only a relay, not a gateway."""

import asyncio
import os
import sys

import aiohttp
import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task
from rollout_backend.serving.server_process import ServerProcess, free_port

PATIENT = {"do": "ask patiently"}
KEY = "a-key-that-both-sides-know-" * 2


class Relay:
    def __init__(self, log) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._process: ServerProcess | None = None

    async def start(self) -> None:
        argv = [sys.executable, "-m", "rollout_backend.relay", "--port", str(self.port)]
        self._process = ServerProcess("the relay", argv, self._log, {**os.environ, "ROLLOUT__RELAY__KEY": KEY})
        await self._process.start()
        await self._process.wait_healthy(self._healthy, 120.0)

    async def stop(self) -> None:
        assert self._process is not None
        await self._process.stop()

    async def _healthy(self) -> bool:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


@pytest.fixture
async def relay(tmp_path):
    relay = Relay(tmp_path / "relay.log")
    await relay.start()
    yield relay
    await relay.stop()


@pytest.mark.slow
async def test_a_run_through_a_relay(open_run, relay, held_back, monkeypatch):
    monkeypatch.setenv("ROLLOUT__RELAY__KEY", KEY)
    holding, asked = False, asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(prompt: str) -> str:
        if holding:
            loop.call_soon_threadsafe(asked.set)
            held_back(prompt)  # the connection is gone when it answers
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
    await relay.stop()
    holding = False
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
