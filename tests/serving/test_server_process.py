"""`ServerProcess`, against real processes."""

import asyncio
import sys

import pytest

from rollout_backend.serving.server_process import ServerProcess


async def test_stop_cancelled_as_the_process_ends_stays_cancelled(tmp_path, monkeypatch):
    """If the cancellation were swallowed, a fleet would wait forever for its supervisor."""
    process = ServerProcess("server", [sys.executable, "-c", "input()"], tmp_path / "log", stdin=b"")
    await process.start()
    waiting, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def wait():
        waiting.set()
        return await ended

    real, process._process.wait = process._process.wait, wait
    stopping = asyncio.create_task(process.stop())
    await waiting.wait()
    ended.set_result(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await real()
