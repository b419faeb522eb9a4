"""What takes the most time to read costs a gateway's event loop, which all sessions share, hardly any.

The measure is the CPU time of the loop's thread, because latencies depend on what else a machine does.
"""

import asyncio
import io
import json
from collections.abc import Awaitable
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from builders import processes_with, run_config
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine
from rollouts import make_claims

CALLS = 128  # gateway.max_concurrent_calls
SESSIONS, TURNS = 64, 6
POSTS = 8
FACTOR = 20
HANG_S = 300
TOOL = '{"type":"function","function":{"name":"f"}}'

RESULT = '{"role":"tool","tool_call_id":"a","content":""}'
PART = {"type": "text", "text": "word " * 12}


class Bench:
    """A gateway process before a scripted engine."""

    def __init__(self, fleet: GatewayFleet, http: aiohttp.ClientSession, pid: int) -> None:
        self._fleet, self._http, self._pid = fleet, http, pid

    async def post(self, session: str, body: bytes, path: str = "/chat/completions") -> int:
        endpoint = self._fleet.endpoint(make_claims(session))
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        async with self._http.post(endpoint.base_url + path, data=io.BytesIO(body), headers=headers) as reply:
            await reply.read()
            return reply.status

    async def ordinary(self) -> int:
        """Make the calls of the ordinary sessions, all of which are answered. Return their number."""

        async def session(number: int) -> None:
            for turn in range(TURNS):
                body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": f"turn {turn}"}]})
                assert await self.post(f"ordinary-{number}", body.encode()) == 200

        await asyncio.gather(*map(session, range(SESSIONS)))
        return SESSIONS * TURNS

    async def loop_s(self, calls: Awaitable[int]) -> float:
        """Return the CPU time of the event loop's thread per call, in seconds."""
        began = self._loop_s()
        number = await calls
        return (self._loop_s() - began) / number

    def _loop_s(self) -> float:
        return int(Path(f"/proc/{self._pid}/task/{self._pid}/schedstat").read_text().split()[0]) / 1e9


def body(messages: str, more: str = "") -> bytes:
    return f'{{"model":"scripted","messages":[{messages}]{more}}}'.encode()


def said(text: str) -> str:
    return json.dumps({"role": "user", "content": text})


MANY = body(",".join([said("a")] * 400_000))
ATTACKS: dict[str, tuple[bytes, str]] = {  # what the session's clients post, and where
    "14 MiB of tiny messages": (MANY, "/chat/completions"),
    "as many messages as are parsed": (body(",".join([said("a")] * 19_000)), "/chat/completions"),
    "as many results of tools": (body(",".join([said("a"), *[RESULT] * 19_000])), "/chat/completions"),
    "as many parts of a text": (body(json.dumps({"role": "user", "content": [PART] * 19_000})), "/chat/completions"),
    "a long text": (body(said("word " * 380_000)), "/chat/completions"),
    "a text of the context's length": (body(said("word " * 6_000)), "/chat/completions"),
    "counting tokens": (body(said("word " * 380_000)), "/messages/count_tokens"),
    "tools": (body(said("a"), f',"tools":[{",".join([TOOL] * 9_000)}]'), "/chat/completions"),
}


@pytest.fixture
async def bench(tmp_path, monkeypatch):
    mark = uuid4().hex
    monkeypatch.setenv("HOSTILE_LOAD", mark)
    model = {"path": BYTE_MODEL, "name": "scripted", "renderer": "chatml", "context_length": 32_768}
    config = run_config(model=model, gateway={"max_concurrent_calls": CALLS})
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    with ScriptedEngine(lambda _: "ok") as engine:
        fleet = GatewayFleet(config, engine.url, tmp_path, journals=tmp_path / "journals")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            try:
                await fleet.start()
                [pid] = [
                    pid for pid, line in processes_with(mark).items() if "-m rollout_backend.model.gateway" in line
                ]
                yield Bench(fleet, http, pid)
            finally:
                await fleet.stop()


async def attack(bench: Bench, content: bytes, path: str) -> int:
    """Post from one session after the other, because each would wait for its next post."""
    for i in range(POSTS):
        await bench.post(f"hostile-{i}", content, path)
    return POSTS


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("name", ATTACKS)
async def test_hostile_sessions_leave_the_event_loop_to_ordinary_ones(bench, name):
    await bench.ordinary()
    ordinary_s = await bench.loop_s(bench.ordinary())
    hostile_s = await bench.loop_s(attack(bench, *ATTACKS[name]))
    print(f"{name}: the event loop works for {hostile_s:.4f} s, and for an ordinary call for {ordinary_s:.4f} s")
    assert hostile_s <= FACTOR * ordinary_s
    attackers = [asyncio.create_task(attack(bench, *ATTACKS[name])) for _ in range(4)]
    await bench.ordinary()
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
