"""64 ordinary sessions keep their latency while one session posts what takes the most time to read."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from builders import run_config
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet
from rollouts import make_claims

CALLS = 128  # gateway.max_concurrent_calls
SESSIONS, TURNS = 64, 6
FACTOR = 10  # of the 99th percentile, on a machine that does other things at the same time
HANG_S = 300
TOOL = '{"type":"function","function":{"name":"f"}}'

RESULT = '{"role":"tool","tool_call_id":"a","content":""}'
PART = {"type": "text", "text": "word " * 12}


class Bench:
    """A gateway process before a scripted engine."""

    def __init__(self, fleet: GatewayFleet, http: aiohttp.ClientSession) -> None:
        self._fleet, self._http = fleet, http

    async def post(self, session: str, body: bytes, path: str = "/chat/completions") -> int:
        endpoint = self._fleet.endpoint(make_claims(session))
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        async with self._http.post(endpoint.base_url + path, data=body, headers=headers) as reply:
            await reply.read()
            return reply.status

    async def percentile(self) -> float:
        """Return the 99th percentile of the calls of the ordinary sessions. All are answered."""
        loop, took = asyncio.get_running_loop(), []

        async def session(number: int) -> None:
            for turn in range(TURNS):
                body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": f"turn {turn}"}]})
                began = loop.time()
                assert await self.post(f"ordinary-{number}", body.encode()) == 200
                took.append(loop.time() - began)

        await asyncio.gather(*map(session, range(SESSIONS)))
        return sorted(took)[int(len(took) * 0.99)]


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
async def bench(tmp_path):
    model = {"path": BYTE_MODEL, "name": "scripted", "renderer": "chatml", "context_length": 32_768}
    config = run_config(model=model, gateway={"max_concurrent_calls": CALLS})
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    with ScriptedEngine(lambda _: "ok") as engine:
        fleet = GatewayFleet(config, engine.url, tmp_path, journals=tmp_path / "journals")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            try:
                await fleet.start()
                yield Bench(fleet, http)
            finally:
                await fleet.stop()


async def attack_until(stop: asyncio.Event, content: bytes, path: str, bench: Bench) -> None:
    while not stop.is_set():
        with contextlib.suppress(aiohttp.ClientError):
            await bench.post("hostile", content, path)


@pytest.mark.slow
@pytest.mark.release  # it measures latency
@pytest.mark.parametrize("attack", ATTACKS)
async def test_ordinary_sessions_keep_their_latency(bench, attack):
    await bench.percentile()
    alone = await bench.percentile()
    stop = asyncio.Event()
    attackers = [asyncio.create_task(attack_until(stop, *ATTACKS[attack], bench)) for _ in range(4)]
    beside = await bench.percentile()
    stop.set()
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    print(f"{attack}: p99 {alone:.2f} s alone, {beside:.2f} s beside it")
    assert beside <= FACTOR * alone
