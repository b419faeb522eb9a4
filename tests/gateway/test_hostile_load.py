"""64 ordinary sessions keep their latency while one session, or a stranger, does its worst to their gateway."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from gateway_server import CONTROL_KEY, SECRET, session_key
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.http_protocol import needed_files
from rollout_backend.local.scripted import BYTE_MODEL, Pieces, Reply, ScriptedEngine
from rollout_backend.serving.server_process import ServerProcess, free_port

CALLS = 128  # gateway.max_concurrent_calls
SESSIONS, TURNS = 64, 6
FACTOR = 10  # of the 99th percentile, on a machine that does other things at the same time
HANG_S = 300
SLOW = "a reply that takes long"
TOOL = '{"type":"function","function":{"name":"f"}}'


class Bench:
    """A gateway process, with few open files, before a scripted engine."""

    def __init__(self, port: int, http: aiohttp.ClientSession) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/v1"
        self.http = http

    def headers(self, session: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {session_key(session)}", "Content-Type": "application/json"}

    async def post(self, session: str, body: bytes | AsyncIterator[bytes], path: str = "/chat/completions") -> int:
        async with self.http.post(self.url + path, data=body, headers=self.headers(session)) as reply:
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


async def headers_without_an_end(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
    try:
        while not reader.at_eof():
            writer.write(b"X-A: " + b"a" * 8000 + b"\r\n")
            await writer.drain()
    finally:
        writer.close()


async def silent_connections(bench: Bench) -> None:
    kept = []
    try:
        for _ in range(50):
            kept.append(await asyncio.open_connection("127.0.0.1", bench.port))  # closed below
        await kept[0][0].read()  # until the gateway closes the first
    finally:
        for _, writer in kept:
            writer.close()


async def unfinished_bodies(bench: Bench) -> None:
    async def half() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield b" " * 2**16
        await asyncio.Event().wait()

    await bench.post("hostile", half())


def repeated(content: bytes, path: str = "/chat/completions") -> Callable[[Bench], Awaitable[object]]:
    return lambda bench: bench.post("hostile", content, path)


MANY = body(",".join([said("a")] * 400_000))
ATTACKS: dict[str, tuple[int, Callable[[Bench], Awaitable[object]]]] = {  # by how many clients
    "headers without an end": (8, headers_without_an_end),
    "silent connections": (8, silent_connections),
    "unfinished bodies": (64, unfinished_bodies),
    "14 MiB of tiny messages": (2, repeated(MANY)),
    "as many messages as are parsed": (4, repeated(body(",".join([said("a")] * 19_000)))),
    "a long text": (4, repeated(body(said("word " * 380_000)))),
    "a text of the context's length": (4, repeated(body(said("word " * 6_000)))),
    "counting tokens": (4, repeated(body(said("word " * 380_000)), "/messages/count_tokens")),
    "tools": (4, repeated(body(said("a"), f',"tools":[{",".join([TOOL] * 9_000)}]'))),
    "very many calls": (64, repeated(body(said("a")))),
    "every slot": (8, repeated(body(said(SLOW), ',"n":16'))),
}  # fmt: skip


def slow_if_asked(prompt: str) -> Reply:
    """Return a long reply to the attack that keeps slots."""

    def pieces() -> Iterator[str]:
        for _ in range(20):
            time.sleep(0.25)  # as slow as a long reply
            yield "a"

    return Pieces(pieces()) if SLOW in prompt else "ok"


@contextlib.asynccontextmanager
async def gateway(log: Path) -> AsyncIterator[Bench]:
    port = free_port()
    settings = GatewaySettings(
        port=port,
        model={"path": BYTE_MODEL, "name": "scripted", "renderer": "chatml", "context_length": 32_768},
        gateway={"max_concurrent_calls": CALLS},
        engine_url="http://127.0.0.1:1",
        secret=SECRET,
        control_key=CONTROL_KEY,
    )
    with ScriptedEngine(slow_if_asked) as engine:
        given = settings.model_dump(mode="json", exclude={"gateway": {"secret"}}) | {"engine_url": engine.url}
        # With few open files: more could be held open than a machine allows.
        argv = ["prlimit", f"--nofile={needed_files(CALLS)}:", sys.executable, "-m", "rollout_backend.gateway"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = ServerProcess("the gateway", argv, log, env, json.dumps(given).encode())
        await process.start()
        try:
            timeout = aiohttp.ClientTimeout(total=HANG_S)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
                bench = Bench(port, http)
                await process.wait_healthy(lambda: answers(bench), 120.0)
                yield bench
        finally:
            await process.stop()


async def answers(bench: Bench) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        return await bench.post("first", body(said("a"))) == 200
    return False


async def attack_until(stop: asyncio.Event, work: Callable[[Bench], Awaitable[object]], bench: Bench) -> None:
    while not stop.is_set():
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.IncompleteReadError):
            await work(bench)
        await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.release  # it measures latency
@pytest.mark.parametrize("attack", ATTACKS)
async def test_ordinary_sessions_keep_their_latency(attack, tmp_path):
    clients, work = ATTACKS[attack]
    async with gateway(tmp_path / "gateway.log") as bench:
        await bench.percentile()
        alone = await bench.percentile()
        stop = asyncio.Event()
        attackers = [asyncio.create_task(attack_until(stop, work, bench)) for _ in range(clients)]
        beside = await bench.percentile()
        stop.set()
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
    print(f"{attack}: p99 {alone:.2f} s alone, {beside:.2f} s beside it")
    assert beside <= FACTOR * alone
