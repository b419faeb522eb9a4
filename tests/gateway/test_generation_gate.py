"""Model calls while a trainer has the engines' memory: they are held, and none reaches an engine."""

import asyncio
import os
import signal
import threading

import openai
import pytest

from rollout_backend.config import RolloutConfig
from rollout_backend.gateway.generation_gate import GateClosed, GenerationGate
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet

SECRET = "the secret of this run " * 2


async def test_closing_cancels_what_runs_and_waits_until_it_has_ended():
    gate, ended = GenerationGate(), asyncio.Event()

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    running = asyncio.create_task(gate.run(call()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await gate.close()
    assert ended.is_set()
    with pytest.raises(GateClosed):
        await running
    with pytest.raises(GateClosed):
        await gate.run(call())
    waiting = asyncio.create_task(gate.wait())
    gate.open()
    await waiting


async def test_a_caller_that_is_cancelled_is_no_closed_gate():
    gate = GenerationGate()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await gate.run(asyncio.Event().wait())
    assert gate.is_open


@pytest.fixture
async def serve(tmp_path, claims):
    """Starts gateways before an engine: the fleet, and a function that asks the model."""
    stops = []

    async def start(engine, **sections):
        config = RolloutConfig.parse(
            {
                "model": {"path": BYTE_MODEL, "name": "m", "renderer": "chatml"},
                "storage": {"bucket": "bucket"},
                "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
                **sections,
            }
        )
        fleet = GatewayFleet(config, engine.url, tmp_path / "logs", SECRET, journals=tmp_path / "gateway")
        await fleet.start()
        stops.append(fleet)
        endpoint = fleet.endpoint(claims())

        async def ask(text: str, retries: int = 0) -> str | None:
            url, key = endpoint.base_url, endpoint.api_key
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries) as client:
                messages = [{"role": "user", "content": text}]
                reply = await client.chat.completions.create(model="m", messages=messages)
                return reply.choices[0].message.content

        return fleet, ask

    yield start
    for fleet in stops:
        await fleet.stop()


async def test_calls_are_held_until_the_engines_are_awake(serve):
    with ScriptedEngine(lambda prompt: "hello") as engine:
        fleet, ask = await serve(engine, gateway={"processes": 2})
        await fleet.pause()
        asked = asyncio.create_task(ask("Hi."))
        done, _ = await asyncio.wait({asked}, timeout=0.5)
        assert not done
        assert engine.requests == []
        await fleet.resume()
        assert await asked == "hello"


async def test_a_call_at_an_engine_is_cut_and_made_again(serve):
    asked, go = threading.Semaphore(0), threading.Event()

    def answer(_: str) -> str:
        asked.release()
        go.wait(30)
        return "hello"

    with ScriptedEngine(answer) as engine:
        fleet, ask = await serve(engine)
        call = asyncio.create_task(ask("Hi."))
        assert await asyncio.to_thread(asked.acquire, timeout=10)
        await fleet.pause()
        async with asyncio.timeout(10):
            while not engine.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not call.done()
        go.set()
        await fleet.resume()
        assert await call == "hello"
        assert len(engine.requests) == 2


@pytest.mark.slow
async def test_a_gateway_that_is_restarted_stays_paused(serve):
    with ScriptedEngine(lambda prompt: "hello") as engine:
        fleet, ask = await serve(engine)
        await fleet.pause()
        asked = asyncio.create_task(ask("Hi.", retries=12))
        os.kill(fleet._shards[0]._process.pid, signal.SIGKILL)
        await fleet._shards[0]._process.wait()
        await fleet.pause()  # returns once it is back
        assert engine.requests == []
        assert not asked.done()
        await fleet.resume()
        assert await asked == "hello"


async def test_a_call_that_is_held_for_too_long_says_why(serve):
    with ScriptedEngine(lambda prompt: "hello") as engine:
        fleet, ask = await serve(engine, timeouts={"model_call_s": 0.5})
        await fleet.pause()
        with pytest.raises(
            openai.InternalServerError, match="they sleep while the trainer has their memory"
        ) as caught:
            await ask("Hi.")
        assert caught.value.response.headers["retry-after"]
        assert engine.requests == []
