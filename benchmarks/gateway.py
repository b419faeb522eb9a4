"""Measure what a model call costs the gateway, and how much latency it adds: `python benchmarks/gateway.py`.

One gateway process with default settings, its journal included, serves agents that use a tool. `load_generator.py`
sends whole conversations, as OpenAI's client does, and `engine_stub.py` answers after a fixed time with the same 60
tokens. The model is the small one that `rollout engine install` brings. The gateway has one core; the load and the
engine share another.

- `history`: tokens of the prompt, on average over a session's calls. The call that opens a session renders all of it,
  and is reported as `opening_cpu_ms`.
- `cpu_ms`: user and system time of the gateway's process per call.
- `calls_per_s`, of agents that call without a pause: how many calls one process serves.
- `added_p50_ms`, `added_p99_ms`, of calls at a fixed rate: a call's time from when it was due, less that of the
  engine. The engine takes so long that the given number of calls are in flight.
- `session_kib`: by how much the process's resident memory grows with a session, from before its first call.

The scenarios of the table are measured if none is named; `--history` measures others:

    python benchmarks/gateway.py --history 8192 --in-flight 100 --rate 200 --stream --json out.json

With `--rivals`, others do some of the same work. The first run installs them from the package index: see
`rivals/environments.py`. One that cannot be installed, or does not answer all calls in time, has no figures; the
reason is in `failed`.

- bare proxy: an aiohttp server that only passes bytes on, which shows what the transport allows.
- toolkit: agentcore-rl-toolkit's gateway, which renders and tokenizes as ours does.
- rllm: rllm-model-gateway, which passes the messages on to an engine and stores the answers.
"""

from __future__ import annotations

import argparse
import argparse as some_module  # the agents read its source
import asyncio
import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame_graph import record
from rivals.environments import RivalFailed, environment, python_of
from tokenizers import Tokenizer

from agent_wrapper.contract import Sampling
from rollout_backend.config import ModelConfig
from rollout_backend.core.session_key import SessionClaims, issue
from rollout_backend.errors import RolloutBackendError
from rollout_backend.gateway.__main__ import allow_files
from rollout_backend.gateway.engine.protocol import STREAM_INTERVAL
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.sessions import journal
from rollout_backend.serving.install import find_model
from rollout_backend.serving.server_process import ServerProcess, free_port

HERE = Path(__file__).parent
SECRET, CONTROL_KEY = "benchmark-" * 4, "controlled-" * 4
MODEL = "m"
CONTEXT_LENGTH = 65_536
TURNS = 8
CALLS = 2400  # of a scenario without a rate
SECONDS = 6.0  # of one with a rate
LIMIT_S = 180.0  # of any
HISTORIES = 4
COMMAND = "grep -rn 'def add_argument' --include='*.py' src tests | sort | head -n 40 && sed -n '1,80p' src/parser.py"


@dataclass(frozen=True)
class Scenario:
    history: int = 2048
    in_flight: int = 32
    stream: bool = False
    rate: float | None = None

    @property
    def sessions(self) -> int:
        if self.rate is None:
            return max(self.in_flight, CALLS // TURNS * 2048 // max(2048, self.history))
        # Enough sessions that each has its answer some time before its next call is due.
        return max(round(1.5 * self.in_flight), round(self.rate * SECONDS / TURNS))

    @property
    def latency_s(self) -> float:
        """The engine's time for a call."""
        return 0.0 if self.rate is None else self.in_flight / self.rate


TABLE = (
    *(Scenario(history) for history in (1024, 2048, 8192, 32_768)),
    Scenario(stream=True),
    Scenario(in_flight=1),
    Scenario(in_flight=1000),
    *(Scenario(history, 1, rate=10) for history in (1024, 8192, 32_768)),
    *(Scenario(in_flight=in_flight, rate=500) for in_flight in (100, 1000)),
    Scenario(in_flight=100, stream=True, rate=500),
)
COMPARED = (
    Scenario(),
    Scenario(stream=True),
    Scenario(8192),
    Scenario(in_flight=100, rate=500),
    Scenario(in_flight=100, stream=True, rate=500),
)
SMOKE = (Scenario(1024, 8), Scenario(1024, 8, stream=True, rate=100))


# --- what agents and engine say -----------------------------------------------------------------------------


class Conversation:
    """The agents' messages and the engine's answers, in tokens of the model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        call = json.dumps({"name": "bash", "arguments": {"command": COMMAND}})
        self.reply_ids = self._ids(f"<tool_call>\n{call}\n</tool_call><|im_end|>")
        self._text = inspect.getsource(some_module)
        self.result = self._cut(self._text[20_000:], 64)
        self.rest = {"model": MODEL, "tools": [tool(name) for name in ("bash", "edit", "search", "submit")]}

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _cut(self, text: str, tokens: int) -> str:
        return str(self._tokenizer.decode(self._ids(text[: 8 * tokens])[:tokens]))

    def history(self, tokens: int, seed: int) -> list[dict[str, Any]]:
        """Return messages of about `tokens` tokens, less half of those that the calls after the first one add."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._cut(self._text, 100)}]
        messages.append({"role": "user", "content": f"Task {seed}: {self._cut(self._text[5000:], 100)}"})
        wanted = tokens - len(self._ids(json.dumps(self.rest))) - 200
        wanted -= TURNS * (len(self.reply_ids) + 64) // 2
        text, i = self._text[1000 * seed :] + self._text * 3, 0
        while wanted > 0:
            result = self._cut(text, min(wanted, 256))
            text, i = text[len(result) :], i + 1
            function = {"name": "bash", "arguments": json.dumps({"command": f"sed -n {i}0,{i}9p src/parser.py"})}
            call = {"id": f"call_{seed}_{i}", "type": "function", "function": function}
            messages.append({"role": "assistant", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            wanted -= 256 + 40
        return messages

    def answers(self, latency_s: float) -> dict[str, Any]:
        """Return the input of `engine_stub.py`: SGLang's answers."""
        ids = self.reply_ids
        logprobs = [[-0.123456789 * (1 + i % 7), token, None] for i, token in enumerate(ids)]
        meta = {"id": "0" * 32, "prompt_tokens": 2048, "weight_version": "0", "cached_tokens": 2000}
        end = {"type": "stop", "matched": ids[-1]}
        whole = meta | {"finish_reason": end, "completion_tokens": len(ids), "output_token_logprobs": logprobs}
        pieces = []
        for n in range(STREAM_INTERVAL, len(ids) + STREAM_INTERVAL, STREAM_INTERVAL):
            new = slice(n - STREAM_INTERVAL, n)
            made = {"completion_tokens": min(n, len(ids)), "output_token_logprobs": logprobs[new]}
            finish = end if n >= len(ids) else None
            pieces.append({"output_ids": ids[new], "meta_info": meta | made | {"finish_reason": finish}})
        function = {"name": "bash", "arguments": json.dumps({"command": COMMAND})}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        deltas = [{} for _ in pieces[1:]] + [{"role": "assistant", "tool_calls": [{"index": 0, **calls[0]}]}]
        return {
            "latency_s": latency_s,
            "reply": {"text": "", "output_ids": ids, "meta_info": whole},
            "pieces": pieces,
            "chat_pieces": [{**head, "choices": [{"index": 0, "delta": delta}]} for delta in deltas],
            "chat": {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {"prompt_tokens": 2048, "completion_tokens": len(ids), "total_tokens": 2048 + len(ids)},
            },
        }


def tool(name: str) -> dict[str, Any]:
    what = {"type": "string", "description": f"what {name} does, in the words of its manual"}
    parameters = {"type": "object", "properties": {"command": what, "reason": what}, "required": ["command"]}
    function = {"name": name, "description": f"Use {name} in the repository.", "parameters": parameters}
    return {"type": "function", "function": function}


# --- a measurement ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """A gateway to measure: the command that serves it at a port, and how its clients call it."""

    argv: list[str]
    port: int
    keys: list[str]
    path: str = "/v1/chat/completions"
    stdin: bytes | None = None
    env: dict[str, str] | None = None


Serve = Callable[[Scenario, Path, int, Path], System]
"""Returns the system for a scenario, a model, the engine's port and a folder for its files."""


def ours(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port, journal_id = free_port(), journal.prepare(work / "journal")
    settings = GatewaySettings(
        port=port,
        model=ModelConfig(path=model, name=MODEL, context_length=CONTEXT_LENGTH),
        engine_url=f"http://127.0.0.1:{engine_port}",
        secret=SECRET,
        control_key=CONTROL_KEY,
        journal=work / "journal",
    )
    keys = [issue(SECRET, claims(f"session-{i}", journal_id)) for i in range(scenario.sessions)]
    argv = [sys.executable, "-m", "rollout_backend.gateway"]
    return System(argv, port, keys, stdin=settings.model_dump_json().encode())


def _keys(scenario: Scenario) -> list[str]:
    return [f"session-{i}" for i in range(scenario.sessions)]


def bare_proxy(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port, script = free_port(), str(HERE / "rivals" / "serve_bare_proxy.py")
    return System([sys.executable, script, str(port), f"http://127.0.0.1:{engine_port}"], port, _keys(scenario))


def toolkit(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port, python = free_port(), str(python_of("agentcore-rl-toolkit"))
    script = str(HERE / "rivals" / "serve_toolkit_gateway.py")
    argv = [python, script, str(port), f"http://127.0.0.1:{engine_port}", str(model)]
    return System(argv, port, _keys(scenario), env=environment())


def rllm(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port, program = free_port(), str(python_of("rllm-model-gateway").with_name("rllm-model-gateway"))
    argv = [program, "--host", "127.0.0.1", "--port", str(port), "--db-path", str(work / "traces.db")]
    argv += ["--worker", f"http://127.0.0.1:{engine_port}/vllm/v1"]
    path = "/sessions/session-{i}/v1/chat/completions"
    return System(argv, port, _keys(scenario), path, env=environment())


SYSTEMS: dict[str, Serve] = {"ours": ours, "bare proxy": bare_proxy, "toolkit": toolkit, "rllm-model-gateway": rllm}
STREAMING = ("ours", "bare proxy")


async def measure(scenario: Scenario, model: Path, serve: Serve, flame: Path | None) -> dict[str, Any]:
    """Raises StartupError if the system does not start, and RuntimeError if it does not do the work."""
    conversation, engine_port = Conversation(model), free_port()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        engine = make_engine(conversation, scenario.latency_s, engine_port, work)
        system = serve(scenario, model, engine_port, work)
        gateway = ServerProcess("the gateway", system.argv, work / "gateway.log", system.env, system.stdin)
        cores = sorted(os.sched_getaffinity(0))
        try:
            await start(engine, engine_port, cores[-1])
            await start(gateway, system.port, cores[0])
            found = await generate(make_job(scenario, conversation, system, gateway.pid), cores[-1], flame)
        finally:
            await gateway.stop()
            await engine.stop()
    return summary(scenario, found)


def make_engine(conversation: Conversation, latency_s: float, port: int, work: Path) -> ServerProcess:
    stdin = json.dumps(conversation.answers(latency_s)).encode()
    argv = [sys.executable, str(HERE / "engine_stub.py"), str(port)]
    return ServerProcess("the engine", argv, work / "engine.log", stdin=stdin)


async def start(server: ServerProcess, port: int, core: int) -> None:
    await server.start()
    assert server.pid is not None
    os.sched_setaffinity(server.pid, {core})
    await server.wait_healthy(lambda: answers(port), 60)


async def ceiling(model: Path) -> str:
    """Return how many calls the load generator and the engine do without a gateway, as a line of text."""
    scenario, port, conversation = Scenario(), free_port(), Conversation(model)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(conversation, 0.0, port, Path(folder))
        core = max(os.sched_getaffinity(0))
        try:
            await start(engine, port, core)
            system = System([], port, ["none"] * 300)
            found = await generate(make_job(scenario, conversation, system, engine.pid), core, None)
        finally:
            await engine.stop()
    calls = len(found["took"])
    return (
        f"load generator and engine stub alone, on one core: {calls / found['seconds']:,.0f} calls/s, "
        f"{found['own_cpu_s'] / calls * 1e6:.0f} and {found['cpu_s'] / calls * 1e6:.0f} µs of CPU per call"
    )


def make_job(scenario: Scenario, conversation: Conversation, system: System, pid: int | None) -> dict[str, Any]:
    return {
        "url": f"http://127.0.0.1:{system.port}",
        "path": system.path,
        "pid": pid,
        "keys": system.keys,
        "histories": [conversation.history(scenario.history, seed) for seed in range(HISTORIES)],
        "result": conversation.result,
        "rest": conversation.rest | ({"stream": True} if scenario.stream else {}),
        "turns": TURNS,
        "rate": scenario.rate,
        "in_flight": scenario.in_flight,
    }


async def generate(job: dict[str, Any], core: int, flame: Path | None) -> dict[str, Any]:
    """Return what the load generator measures."""
    generator = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "load_generator.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    os.sched_setaffinity(generator.pid, {core})
    if flame is not None:
        record(job["pid"], flame)
    try:
        output, _ = await asyncio.wait_for(generator.communicate(json.dumps(job).encode()), LIMIT_S)
    except TimeoutError:
        generator.kill()
        await generator.wait()
        raise RuntimeError(f"the calls were not answered within {LIMIT_S:g} s") from None
    if generator.returncode:
        raise RuntimeError("a session could not be opened")
    found: dict[str, Any] = json.loads(output)
    return found


def claims(session_id: str, journal_id: str) -> SessionClaims:
    return SessionClaims(
        run_id="benchmark",
        step=0,
        rollout_id=session_id,
        attempt=1,
        session_id=session_id,
        sampling=Sampling(),
        expires_at=time.time() + 3600,
        journal_id=journal_id,
    )


async def answers(port: int) -> bool:
    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError:
            return True  # a rival's health has another path
        except OSError:
            return False

    return await asyncio.to_thread(ask)


def summary(scenario: Scenario, found: dict[str, Any]) -> dict[str, Any]:
    calls = len(found["took"])
    made: dict[str, Any] = dataclasses.asdict(scenario) | {"asked_in_flight": scenario.in_flight, "calls": calls}
    del made["in_flight"]
    p50 = p99 = None
    if scenario.rate is not None:
        cuts = statistics.quantiles([seconds - scenario.latency_s for seconds in found["took"]], n=100)
        p50, p99 = 1000 * cuts[49], 1000 * cuts[98]
    return made | {
        "calls_per_s": calls / found["seconds"],
        "cpu_ms": 1000 * found["cpu_s"] / calls,
        "opening_cpu_ms": 1000 * found["opening_cpu_s"] / scenario.sessions,
        "added_p50_ms": p50,
        "added_p99_ms": p99,
        "session_kib": found["session_bytes"] / 1024,
        "errors": ", ".join(f"{count} {error}" for error, count in found["errors"].items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, nargs="*", default=[], help="tokens of a prompt; several are several")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--rate", type=float, help="calls per second; without it, agents call without a pause")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="little work, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--flame", type=Path, help="write a flame graph of the gateway to this file (SVG, or .txt)")
    rivals = [*SYSTEMS][1:]
    parser.add_argument("--rivals", nargs="*", choices=rivals, help="measure these, or all, instead of ours")
    options = parser.parse_args()
    model = find_model()
    allow_files(1500)
    wanted = ["ours"] if options.rivals is None else options.rivals or rivals
    named = [Scenario(tokens, options.in_flight, options.stream, options.rate) for tokens in options.history]
    scenarios = named or (SMOKE if options.smoke else TABLE if options.rivals is None else COMPARED)
    found: dict[str, Any] = {"ceilings": [asyncio.run(ceiling(model))] if options.rivals is None else [], "rows": []}
    for scenario in scenarios:
        for name in wanted:
            if scenario.stream and name not in STREAMING:
                continue
            try:
                made = asyncio.run(measure(scenario, model, SYSTEMS[name], options.flame))
            except (RivalFailed, RolloutBackendError, RuntimeError) as error:
                if name == "ours":
                    raise
                made = dataclasses.asdict(scenario) | {"asked_in_flight": scenario.in_flight, "failed": str(error)}
            found["rows"].append({"system": name, **made})
            print(json.dumps(found["rows"][-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
