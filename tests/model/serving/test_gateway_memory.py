"""The memory of a gateway does not grow with the number of sessions that it has served."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from agent_wrapper.contract import Trajectory
from builders import served

FEW, MANY = 2_000, 8_000
AT_ONCE = 16


async def generate(request: web.Request) -> web.Response:
    await request.read()
    if request.path != "/generate":
        return web.Response(status=404)
    meta = {"finish_reason": {"type": "stop"}, "cached_tokens": 0, "weight_version": "0"}
    return web.json_response({"output_ids": [72, 105, 257], "meta_info": meta})


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
async def test_a_closed_session_leaves_less_than_a_kilobyte(start_fleet, claims):
    """Its name is remembered. An open one takes several kilobytes, and the first ones fill the caches."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 512}]}

    async def live(http: aiohttp.ClientSession, numbers) -> None:
        for number in numbers:
            endpoint = gateway.endpoint(claims(f"session-{number}"))
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
            async with http.post(endpoint.trajectory_url, headers=headers) as reply:
                sealed = await reply.read()
        assert len(Trajectory.decode(sealed).segments) == 1

    async def serve(new: range) -> None:
        numbers = iter(new)
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(live(http, numbers))
        await gateway.revoke(f"session-{number}" for number in new)  # as a step does at its end

    async with served(generate) as url:
        gateway = await start_fleet(SimpleNamespace(url=url))
        sizes = []
        for first, last in ((0, FEW), (FEW, FEW + MANY)):
            for begin in range(first, last, 1000):
                await serve(range(begin, begin + 1000))
            sizes.append(rss_bytes(gateway._shards[0]._process.pid))
        stats = await gateway.stats()
        await gateway.stop()
    assert (stats.calls, stats.sessions_open, stats.sessions_closed) == (FEW + MANY, 0, FEW + MANY)
    few, many = sizes
    assert (many - few) / MANY < 1024, f"{(many - few) / MANY:.0f} bytes of each session stay"


_FREE_BLOCKS = """
import os, sys
from pathlib import Path
from rollout_backend.model.gateway.__main__ import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "return":
    return_freed_memory()
before, small, large = resident(), [], []
for _ in range(1000):
    large.append(b"x" * 100_000)
    small.append(b"x" * 20_000)
large.clear()
print((resident() - before) // 10**6)
"""


def test_large_blocks_that_are_freed_between_small_ones_are_returned_to_the_system():
    found = {}
    for kind in ("keep", "return"):
        argv = [sys.executable, "-c", _FREE_BLOCKS, kind]
        found[kind] = int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert found["return"] <= 25
    assert found["keep"] >= 80
