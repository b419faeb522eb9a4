"""Load a router and several gateways as agents on a cluster do, and kill parts meanwhile.

    python benchmarks/cluster_load.py --json out.json
    python benchmarks/cluster_load.py --smoke

Router, gateways, journals and their supervision are those of a run (`serving.kind=external`). The engines are
scripted, one process each. All processes are on this machine, so they share its cores. An agent asks, reads the
reply, uses a tool, and sends the whole conversation again, until its session is over: then it fetches its trajectory,
the session is revoked, and another one begins. `--sessions` of them are open at any time.

One hour is compressed by `--factor`: engines take 4.5 s for a reply and tools 450 s on average, both divided by it.
The timers of router, gateways and supervision are not compressed. An engine, the router and a gateway are killed
(SIGKILL) after 10, 16 and 22 minutes. Agents retry as the agents' wrapper sets OpenAI's
client: up to 40 times.

- `failed`: calls that an agent saw fail, because it had no retry left or a retry cannot help. `retried`: errors that
  an agent retried, by kind.
- `added`: the time of a call less that of the engine's reply, retries included. `quiet` is without the calls that
  were in flight within 20 s after a kill.
- `growth`: the slope of a gateway's resident memory over the second half of the hour, without the killed one.
- `session`: by how much the memory of all gateways had grown for each open session after half an hour.
- `wrong`: sessions whose trajectory is not what the engines replied: its turns are counted, and each reply is
  computed again from the tokens before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from cluster_engine import answer
from long_run import children, mebibytes
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from agent_wrapper.contract import ModelEndpoint, Sampling, Trajectory
from rollout_backend.config import load_config
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.gateway.open_files import allow_files
from rollout_backend.local.scripted import BYTE_MODEL, LOGPROB
from rollout_backend.serving.model_serving import ModelServing
from rollout_backend.serving.server_process import ServerProcess, free_port
from rollout_backend.serving.supervisor import ServingEvent

HOUR_S = 3600.0
REPLY_S = 4.5
TOOL_S = 450.0
TURNS = range(2, 7)
TASK = "Find out why the test of the parser fails, and correct it. " * 5
RESULT = "src/parser.py:117: def add_argument(self, name, *flags, **options): " * 4
DISTURBED_S = 20.0  # not of the hour, but of the clock
REVOKE_S = 0.5
KILLED_AT_S = (600.0, 960.0, 1320.0)
SAMPLES = 120  # of memory, in the hour
RETRIED = frozenset({408, 409, 429})  # and every 5xx, as OpenAI's client
RETRIES = 40


@dataclass
class Measured:
    """What the agents saw."""

    calls: list[tuple[float, float]] = field(default_factory=list)  # when each began, and how long it took
    retried: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sessions: int = 0  # closed ones
    open: int = 0


class Agents:
    """Keeps `count` sessions open until `over`."""

    def __init__(self, serving: ModelServing, http: aiohttp.ClientSession, factor: float, count: int) -> None:
        self.measured = Measured()
        self.over = asyncio.Event()
        self._serving = serving
        self._http = http
        self._factor = factor
        self._count = count
        self._closed: list[str] = []
        self._checks = ProcessPoolExecutor(1)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                revoking = tasks.create_task(self._revoke())
                await asyncio.gather(*map(self._use_sessions, range(self._count)))
                revoking.cancel()
            await self._revoke_closed()
        finally:
            self._checks.shutdown()

    async def _use_sessions(self, nth: int) -> None:
        draw = random.Random(nth)
        turns = draw.randrange(TURNS.stop)  # the first sessions began before the hour
        await self._wait(draw.uniform(0.0, TOOL_S))
        for i in range(sys.maxsize):
            if self.over.is_set():
                return
            await self._use_session(f"session-{nth}-{i}", max(1, turns), draw)
            turns = draw.choice(TURNS)

    async def _use_session(self, name: str, turns: int, draw: random.Random) -> None:
        claims = SessionClaims(
            run_id="load", step=0, rollout_id=name, attempt=1, session_id=name, sampling=Sampling(max_tokens=256),
            expires_at=time.time() + 7200,
        )  # fmt: skip
        endpoint = self._serving.gateways.endpoint(claims)
        messages = [{"role": "user", "content": f"Task {name}: {TASK}"}]
        self.measured.open += 1
        made = 0
        while made < turns and not self.over.is_set():
            body = json.dumps({"model": endpoint.name, "messages": messages}).encode()
            began = time.monotonic()
            data = await self._post(f"{endpoint.base_url}/chat/completions", endpoint, body)
            if data is None:
                break
            self.measured.calls.append((began, time.monotonic() - began))
            made += 1
            messages.append({"role": "assistant", "content": json.loads(data)["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": f"{made}: {RESULT}"})
            await self._wait(draw.expovariate(1 / TOOL_S))
        sealed = await self._post(endpoint.trajectory_url, endpoint, b"")
        if sealed is not None:
            check = asyncio.get_running_loop().run_in_executor(self._checks, difference, sealed, made)
            if why := await check:
                self.measured.wrong.append(f"{name}: {why}")
        self._closed.append(name)
        self.measured.open -= 1
        self.measured.sessions += 1

    async def _post(self, url: str, endpoint: ModelEndpoint, body: bytes) -> bytes | None:
        """Return the response, or None after the last retry."""
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        for retry in range(RETRIES + 1):
            wait_s = min(8.0, 0.5 * 2**retry)
            headers["X-Stainless-Retry-Count"] = str(retry)
            try:
                async with self._http.post(url, data=body, headers=headers) as response:
                    data = await response.read()
                    if response.status == 200:
                        return data
                    error = f"HTTP {response.status} {_code(data)}"
                    if response.status not in RETRIED and response.status < 500:
                        break
                    wait_s = float(response.headers.get("Retry-After", wait_s))
            except (aiohttp.ClientError, ConnectionError) as failure:
                error = type(failure).__name__
            self.measured.retried[error] += 1
            await asyncio.sleep(wait_s)
        self.measured.failed[error] += 1
        return None

    async def _wait(self, seconds: float) -> None:
        """Wait for a part of the hour, or until it is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds / self._factor)

    async def _revoke(self) -> None:
        while True:
            await asyncio.sleep(REVOKE_S)
            await self._revoke_closed()

    async def _revoke_closed(self) -> None:
        closed, self._closed = self._closed, []
        if closed:
            await self._serving.gateways.revoke(closed)


def _code(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return data[:80].decode(errors="replace")


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BYTE_MODEL / "tokenizer.json"))


def difference(sealed: bytes, calls: int) -> str:
    """Return how a trajectory differs from what the engines replied; empty if it does not."""
    segments = Trajectory.decode(sealed).segments
    if (found := [len(segment.turns) for segment in segments]) != [calls] * (calls > 0):
        return f"the turns of its segments are {found}, and {calls} calls were answered"
    for segment in segments:
        for turn in segment.turns:
            prompt = _tokenizer().decode(segment.token_ids[: turn.start], skip_special_tokens=False)
            reply = _tokenizer().decode(segment.token_ids[turn.start : turn.end], skip_special_tokens=False)
            if reply != f"{answer(prompt)}<|im_end|>":
                return f"a reply of {turn.end - turn.start} tokens is not the engine's: {reply!r}"
            if set(segment.logprobs[turn.start : turn.end]) != {LOGPROB}:
                return "a logprob is not the engine's"
    return ""


class Engines:
    """Scripted engines, one process each."""

    def __init__(self, count: int, reply_s: float, logs: Path) -> None:
        self._ports = [free_port() for _ in range(count)]
        self._servers = [self._server(i, reply_s, logs) for i in range(count)]

    def _server(self, i: int, reply_s: float, logs: Path) -> ServerProcess:
        argv = [sys.executable, str(Path(__file__).with_name("cluster_engine.py")), str(self._ports[i]), str(reply_s)]
        return ServerProcess(f"engine {i}", argv, logs / f"engine-{i}.log")

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    async def start(self) -> None:
        await asyncio.gather(*map(self._start, range(len(self._ports))))

    async def _start(self, i: int) -> None:
        await self._servers[i].start()
        await self._servers[i].wait_healthy(lambda: self._answers(i), 60)

    async def _answers(self, i: int) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"{self.urls[i]}/health") as response:
                return response.status == 200
        return False

    async def kill(self, i: int) -> None:
        """Kill an engine, and start it again at its address."""
        _kill(self._servers[i].pid)
        await self._servers[i].stop()
        await self._start(i)

    async def counts(self, http: aiohttp.ClientSession) -> list[dict[str, int]]:
        """Return the calls and sessions of each engine, since it started."""
        found = []
        for url in self.urls:
            async with http.get(f"{url}/counts") as response:
                found.append(await response.json())
        return found

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self._servers))


def _kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Sample:
    """The resident memory of the gateways by pid, and of the router, in MiB. `at`: seconds of the hour."""

    at: float
    sessions: int
    gateways: dict[int, float]
    router: float


def gateways() -> list[int]:
    return children(b"rollout_backend.gateway")


def sample(at: float, sessions: int) -> Sample:
    router = sum(mebibytes(pid) for pid in children(b"sglang"))
    return Sample(at, sessions, {pid: mebibytes(pid) for pid in gateways()}, router)


async def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Raises StartupError if a part does not start, and ServingError if one is lost for good."""
    factor, events = options.factor, list[ServingEvent]()
    engines = Engines(options.engines, REPLY_S / factor, work)
    config = load_config(
        env={},
        base={
            "run_id": "load",
            "model": {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 32_768},
            "serving": {"kind": "external", "urls": engines.urls, "min_servers": options.engines},
            "gateway": {"processes": options.gateways},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},  # not used
            "storage": {"bucket": "not-used"},
            "output_dir": str(work),
        },
    )
    serving = ModelServing(config, work, events.append)
    try:
        await engines.start()
        await serving.start("benchmark-" * 4)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=5)  # as httpx, OpenAI's client
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as http:
            agents = Agents(serving, http, factor, options.sessions)
            kills: list[tuple[str, Callable[[], Awaitable[None]]]] = [
                ("engine", lambda: engines.kill(0)),
                ("router", lambda: asyncio.to_thread(_kill, children(b"sglang")[0])),
                ("gateway", lambda: asyncio.to_thread(_kill, gateways()[0])),
            ]
            hour = await _hour(agents, lambda: engines.counts(http), factor, kills)
            stats = await serving.gateways.stats()
    finally:
        await serving.stop()
        await engines.stop()
    found = summary(agents.measured, hour, factor)
    seen = Counter(f"{event.server.partition('-')[0]} {event.kind}" for event in events)
    found |= {"engines": options.engines, "gateways": options.gateways, "factor": factor}
    return found | {"events": dict(seen), "gateway_errors": stats.errors}


@dataclass
class Hour:
    """What was observed besides the calls."""

    samples: list[Sample] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)  # when, by the monotonic clock
    counts: list[list[dict[str, int]]] = field(
        default_factory=list
    )  # of the engines, before each kill and at the end


async def _hour(
    agents: Agents,
    counts: Callable[[], Awaitable[list[dict[str, int]]]],
    factor: float,
    kills: Sequence[tuple[str, Callable[[], Awaitable[None]]]],
) -> Hour:
    """Run the agents for an hour, and kill parts meanwhile."""
    hour, began = Hour([sample(0.0, 0)]), time.monotonic()
    running = asyncio.create_task(agents.run())
    due = [*zip(KILLED_AT_S, kills, strict=True)]
    for i in range(1, SAMPLES + 1):
        await asyncio.wait([running], timeout=max(0.0, began + HOUR_S / factor * i / SAMPLES - time.monotonic()))
        if running.done():
            break
        at = (time.monotonic() - began) * factor
        hour.samples.append(sample(at, agents.measured.open))
        while due and at >= due[0][0]:
            _, (name, kill) = due.pop(0)
            hour.counts.append(await counts())
            hour.killed[name] = time.monotonic()
            await kill()
        if i % (SAMPLES // 12) == 0:
            print(f"{at / 60:.0f} min: {len(agents.measured.calls)} calls", file=sys.stderr, flush=True)
    hour.counts.append(await counts())
    agents.over.set()
    await running
    return hour


def summary(measured: Measured, hour: Hour, factor: float) -> dict[str, Any]:
    first, last = hour.samples[0], hour.samples[-1]
    late = [each for each in hour.samples if each.at >= HOUR_S / 2]
    lasting = set.intersection(*(set(each.gateways) for each in hour.samples))  # without the killed gateway

    def mean_of(at: Sample) -> float:
        return statistics.mean(at.gateways[pid] for pid in lasting)

    added = [(began, took, took - REPLY_S / factor) for began, took in measured.calls]
    quiet = [
        each
        for began, took, each in added
        if not any(began < at + DISTURBED_S and at < began + took for at in hour.killed.values())
    ]
    before, after = ([each["calls"] for each in hour.counts[i][1:]] for i in (1, -1))  # the first engine was killed
    return {
        "calls": len(measured.calls),
        "sessions_open": statistics.median(each.sessions for each in late),
        "sessions_closed": measured.sessions,
        "failed": dict(measured.failed),
        "retried": dict(measured.retried),
        "wrong": measured.wrong,
        "added_ms": quantiles([each for _, _, each in added]),
        "quiet_ms": quantiles(quiet),
        "engine_calls": spread(before),
        "engine_calls_after_router": spread([b - a for a, b in zip(before, after, strict=True)]),
        "engine_sessions": spread([each["sessions"] for each in hour.counts[-1][1:]]),
        "gateway_mib": [mean_of(first), mean_of(late[0]), mean_of(last)],
        "gateway_growth_mib": HOUR_S
        * statistics.linear_regression([each.at for each in late], [mean_of(each) for each in late])[0],
        "session_kib": 1024 * len(first.gateways) * (mean_of(late[0]) - mean_of(first)) / late[0].sessions,
        "router_mib": [first.router, late[0].router, last.router],
        "samples": [vars(each) for each in hour.samples],
    }


def spread(numbers: Sequence[int]) -> list[float]:
    """Return the minimum, the median and the maximum."""
    return [min(numbers), statistics.median(numbers), max(numbers)]


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": 1000 * cuts[49], "p99": 1000 * cuts[98], "max": 1000 * max(seconds)}


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def listed(numbers: Mapping[str, Any]) -> str:
        return ", ".join(f"{value:,.0f} {name}" for name, value in numbers.items()) or "none"

    def several(numbers: Sequence[float]) -> str:
        return " / ".join(f"{number:,.0f}" for number in numbers)

    yield "engines, gateways", f"{found['engines']}, {found['gateways']}"
    yield "sessions open, closed", f"{found['sessions_open']:,.0f}, {found['sessions_closed']:,}"
    yield "calls", f"{found['calls']:,}"
    yield "failed", listed(found["failed"])
    yield "retried", listed(found["retried"])
    yield "wrong sessions", str(len(found["wrong"]))
    yield "added ms, quiet", listed(found["quiet_ms"])
    yield "added ms, with kills", listed(found["added_ms"])
    yield "calls per engine until the router's kill, min / median / max", several(found["engine_calls"])
    yield "calls per engine after it", several(found["engine_calls_after_router"])
    yield "sessions per engine", several(found["engine_sessions"])
    yield "gateway MiB, before / half / end of the hour", several(found["gateway_mib"])
    yield "gateway growth, MiB per hour", f"{found['gateway_growth_mib']:.1f}"
    yield "session KiB", f"{found['session_kib']:.1f}"
    yield "router MiB, before / half / end of the hour", several(found["router_mib"])
    yield "events", listed(found["events"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--gateways", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--factor", type=float, default=12.0, help="by how much the hour is compressed")
    parser.add_argument("--smoke", action="store_true", help="little work, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.smoke:
        options.engines, options.gateways, options.sessions, options.factor = 3, 2, 40, 200.0
    allow_files(options.sessions)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    table = Table("figure", "")
    for row in rows(found):
        table.add_row(*row)
    Console(width=120).print(table)
    for problem in found["wrong"][:20]:
        print(problem, file=sys.stderr)
    sys.exit(bool(found["failed"] or found["wrong"]))


if __name__ == "__main__":
    main()
