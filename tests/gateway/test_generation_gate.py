import asyncio

import pytest

from rollout_backend.gateway.generation_gate import GateClosed, GenerationGate


async def test_closing_cancels_running_calls_and_waits_until_they_have_ended():
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


async def test_a_cancelled_caller_does_not_close_the_gate():
    gate = GenerationGate()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await gate.run(asyncio.Event().wait())
    assert gate.is_open
