"""Measure the latency that the gateway adds to model calls under load: `python benchmarks/gateway_load.py`.

Sessions start evenly spread over the duration of one call, and then call without a pause, each with a growing
conversation. The engine answers each call after a fixed time, independently of the load. The rest of a call's
duration is added by the gateway: reading, rendering, tokenizing, recording, and waiting for its event loop. Client
and engine use cores of the same machine, so the figures are an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from rich.console import Console
from rich.table import Table

from agent_wrapper.contract import ModelEndpoint, Sampling
from rollout_backend.config import RolloutConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.gateway.__main__ import allow_files
from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.serving.engine import is_healthy
from rollout_backend.serving.gateway_fleet import GatewayFleet
from rollout_backend.serving.server_process import ServerProcess, free_port

REPLY_TOKENS = 128
QUESTION = "What does this file do? " * 20  # 480 tokens of a byte-level tokenizer
COLUMNS = ("processes", "in flight", "calls", "calls/s", "added p50", "added p99", "CPU/call", "RSS MiB", "errors")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Load:
    """One measurement. Times are in seconds."""

    processes: int
    in_flight: int
    seconds: float = 0.0
    added: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0  # of the gateways
    rss_bytes: int = 0

    def row(self) -> list[str]:
        calls = len(self.added)
        if calls < 2:
            return [str(self.processes), str(self.in_flight), "0", "", "", "", "", "", str(dict(self.errors))]
        cuts = statistics.quantiles(self.added, n=100)
        return [
            str(self.processes),
            str(self.in_flight),
            str(calls),
            f"{calls / self.seconds:.0f}",
            f"{cuts[49] * 1000:.0f}",
            f"{cuts[98] * 1000:.0f}",
            f"{self.cpu_s / calls * 1000:.1f}",
            f"{self.rss_bytes / 2**20:.0f}",
            ", ".join(f"{count} {error}" for error, count in self.errors.items()) or "none",
        ]


def serve_engine(port: int, latency_s: float) -> None:
    """Serve an engine that answers each call after `latency_s`."""

    async def generate(request: web.Request) -> web.Response:
        began = time.monotonic()
        body = await request.json()
        ids = [65 + i % 26 for i in range(REPLY_TOKENS)]
        await asyncio.sleep(latency_s - (time.monotonic() - began))
        meta = {
            "finish_reason": {"type": "stop"},
            "cached_tokens": len(body["input_ids"]),
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/generate", generate)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, backlog=4096, print=None)


def settings(processes: int, in_flight: int) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "model": {"path": BYTE_MODEL, "name": "m", "renderer": "chatml", "context_length": 65536},
            "storage": {"bucket": "none"},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
            "gateway": {"processes": processes, "max_concurrent_calls": in_flight},
        }
    )


async def measure(
    processes: int, in_flight: int, turns: int, latency_s: float, logs: Path, journal: bool = True
) -> Load:
    load = Load(processes, in_flight)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, __file__, "--engine", str(port), "--latency-s", str(latency_s)]
    engine = ServerProcess("the engine", argv, logs / "engine.log")
    journals = logs / "gateway" if journal else None
    gateway = GatewayFleet(settings(processes, in_flight), url, logs, journals=journals)
    try:
        await engine.start()
        await engine.wait_healthy(lambda: is_healthy(url), 30)
        await gateway.start()
        endpoints = [gateway.endpoint(claims(f"session-{i}")) for i in range(in_flight)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            began, cpu_s = time.monotonic(), sum(_cpu_s(pid) for pid in _pids(gateway))
            conversing = (
                converse(http, endpoint, turns, latency_s, load, starts_in_s=latency_s * i / in_flight)
                for i, endpoint in enumerate(endpoints)
            )
            await asyncio.gather(*conversing)
            load.seconds = time.monotonic() - began
            load.cpu_s = sum(_cpu_s(pid) for pid in _pids(gateway)) - cpu_s
            load.rss_bytes = sum(_rss_bytes(pid) for pid in _pids(gateway))
    finally:
        await gateway.stop()
        await engine.stop()
    return load


async def converse(
    http: aiohttp.ClientSession, endpoint: ModelEndpoint, turns: int, latency_s: float, load: Load, starts_in_s: float
) -> None:
    await asyncio.sleep(starts_in_s)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": QUESTION})
        began = time.monotonic()
        try:
            body = {"model": endpoint.name, "messages": messages}
            async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
                answer = await response.json()
        except aiohttp.ClientError as error:
            load.errors[type(error).__name__] += 1
            return
        if response.status != 200:
            load.errors[f"HTTP {response.status}"] += 1
            return
        load.added.append(time.monotonic() - began - latency_s)
        messages.append(answer["choices"][0]["message"])


def claims(session_id: str) -> SessionClaims:
    return SessionClaims(
        run_id="benchmark",
        step=0,
        rollout_id=session_id,
        attempt=1,
        session_id=session_id,
        sampling=Sampling(),
        expires_at=time.time() + 3600,
    )


def _pids(gateway: GatewayFleet) -> list[int]:
    return [shard._process.pid for shard in gateway._shards]  # type: ignore[attr-defined]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--turns", type=int, default=4, help="consecutive calls of each session")
    parser.add_argument("--latency-s", type=float, default=1.0, help="the engine's time for each call")
    parser.add_argument("--no-journal", action="store_true", help="run without the journal, to leave out its cost")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)  # the port: this process is the engine
    args = parser.parse_args()
    if args.engine is not None:
        serve_engine(args.engine, args.latency_s)
        return
    allow_files(max(args.in_flight))
    title = f"engine latency {args.latency_s:g} s; {args.turns} turns per session; times in ms"
    table = Table(*COLUMNS, title=title)
    with tempfile.TemporaryDirectory() as folder:
        for processes in args.processes:
            for in_flight in args.in_flight:
                logs = Path(folder) / f"{processes}-{in_flight}"
                load = asyncio.run(
                    measure(processes, in_flight, args.turns, args.latency_s, logs, not args.no_journal)
                )
                table.add_row(*load.row())
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
