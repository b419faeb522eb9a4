import asyncio

import pytest

from rollout_backend.gateway.engine.engines import CallsPaused, Engines


async def test_a_pause_cancels_running_calls_and_waits_until_they_have_ended():
    calls, ended = Engines("http://engine"), asyncio.Event()

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    running = asyncio.create_task(calls.run(call()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await calls.pause()
    assert ended.is_set()
    with pytest.raises(CallsPaused):
        await running
    with pytest.raises(CallsPaused):
        await calls.run(call())
    waiting = asyncio.create_task(calls.wait_resumed())
    calls.resume()
    await waiting


async def test_a_cancelled_caller_does_not_pause_calls():
    calls = Engines("http://engine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await calls.run(asyncio.Event().wait())
    assert not calls.paused
