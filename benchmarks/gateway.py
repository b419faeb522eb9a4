"""Measure what a model call costs the gateway, and how much latency it adds: `python benchmarks/gateway.py`.

One gateway process with default settings, its journal included, serves agents that use a tool. `load_generator.py`
sends whole conversations, as OpenAI's client does, and `engine_stub.py` answers after a fixed time with the same 60
tokens. The model is the small one that `rollout engine install` brings. The gateway has one core; this process, which
makes the load, and the engine share another. Rivals do some of the same work; see `rivals/environments.py`.

- `history`: tokens of the prompt, on average over a session's calls.
- `added_p50_ms`, `added_p99_ms`, of calls at a fixed rate: a call's time from when it was due, less that of the
  engine. The engine takes so long that the given number of calls are in flight.
- `session_kib`: by how much the process's resident memory grows with a session, from before its first call.
"""

import argparse as some_module  # the agents read its source
import asyncio
import contextlib
import gc
import inspect
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, Unmeasured, arguments, compare, kept_folder, serving
from load_generator import Session, generate
from rivals.environments import command, environment, python_of
from tokenizers import Tokenizer

from agent_wrapper.contract import Sampling
from rollout_backend.config import ModelConfig
from rollout_backend.core.session_key import SessionClaims, issue
from rollout_backend.model.gateway.access import allow_files
from rollout_backend.model.gateway.engine.protocol import STREAM_INTERVAL
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.model.serving.install import find_model
from rollout_backend.model.serving.server_process import free_port

SECRET, CONTROL_KEY = "benchmark-" * 4, "controlled-" * 4
MODEL = "m"
CONTEXT_LENGTH = 65_536
CALLS = 2400  # of a scenario without a rate
SECONDS = 6.0  # of one with a rate
HISTORIES = 4
COMMAND = "grep -rn 'def add_argument' --include='*.py' src tests | sort | head -n 40 && sed -n '1,80p' src/parser.py"


@dataclass(frozen=True)
class Scenario:
    history: int = 2048
    in_flight: int = 32
    stream: bool = False
    rate: float | None = None
    turns: int = 8
    result: int = 64  # tokens of a tool's result
    results: int = 1  # different ones
    limit_s: float = 180.0

    @property
    def sessions(self) -> int:
        if self.rate is None:
            return max(self.in_flight, CALLS // self.turns * 2048 // max(2048, self.history))
        # Enough sessions that each has its answer some time before its next call is due.
        return max(round(1.5 * self.in_flight), round(self.rate * SECONDS / self.turns))

    @property
    def latency_s(self) -> float:
        """The engine's time for a call."""
        return 0.0 if self.rate is None else self.in_flight / self.rate


COMPARED = (Scenario(), Scenario(8192), Scenario(in_flight=100, rate=500))
FLOOR = (*COMPARED, Scenario(stream=True), Scenario(in_flight=100, stream=True, rate=500))
TABLE = (
    *FLOOR,
    *(Scenario(history) for history in (1024, 32_768)),
    *(Scenario(in_flight=in_flight) for in_flight in (1, 1000)),
    *(Scenario(history, 1, rate=10) for history in (1024, 8192, 32_768)),
    Scenario(in_flight=1000, rate=500),
)
SMOKE = (Scenario(1024, 8), Scenario(1024, 8, stream=True, rate=100))


# --- what agents and engine say -----------------------------------------------------------------------------


class Conversation:
    """The agents' messages and the engine's answers, in tokens of the model."""

    def __init__(self, model: Path, scenario: Scenario = Scenario()) -> None:
        self._scenario = scenario
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        call = json.dumps({"name": "bash", "arguments": {"command": COMMAND}})
        self.reply_ids = self.ids(f"<tool_call>\n{call}\n</tool_call><|im_end|>")
        self._text = inspect.getsource(some_module)
        starts = range(20_000, 20_000 + 1000 * scenario.results, 1000)
        self._results = [self._cut(self._text[start:], scenario.result) for start in starts]
        self.rest = {"model": MODEL, "tools": [tool(name) for name in ("bash", "edit", "search", "submit")]}

    def results(self, session: int) -> Iterator[str]:
        """Return what the tool returns to a session's calls, without an end."""
        first = session % len(self._results)
        return itertools.cycle(self._results[first:] + self._results[:first])

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _cut(self, text: str, tokens: int) -> str:
        return str(self._tokenizer.decode(self.ids(text[: 8 * tokens])[:tokens]))

    def history(self, seed: int) -> list[dict[str, Any]]:
        """Return the messages of the first call, with which a session's prompts have `history` tokens on average."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._cut(self._text, 100)}]
        messages.append({"role": "user", "content": f"Task {seed}: {self._cut(self._text[5000:], 100)}"})
        wanted = self._scenario.history - len(self.ids(json.dumps(self.rest))) - 200
        wanted -= self._scenario.turns * (len(self.reply_ids) + self._scenario.result) // 2
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

SYSTEMS = {
    "ours": TABLE,
    "bare proxy": FLOOR,
    "toolkit": COMPARED,
    "rllm-model-gateway": COMPARED,
    "no gateway": COMPARED[:1],
}


@dataclass
class System:
    """A gateway to measure: the command that serves it at `port`, and how its clients call it."""

    port: int
    engine: str  # its URL
    model: Path
    work: Path
    keys: list[str]  # of the sessions
    path: str = "/v1/chat/completions"
    stdin: bytes = b""
    env: dict[str, str] | None = None
    certificate: Path | None = None  # with its key; the gateway then speaks TLS

    def prepare(self, name: str) -> list[str]:
        """Return the command, which is empty without a gateway, and set what differs."""
        match name:
            case "ours":
                return self._ours()
            case "bare proxy":
                return [*command("bare_proxy"), str(self.port), self.engine]
            case "toolkit":
                self.env = environment()
                return [*command("toolkit_gateway"), str(self.port), self.engine, str(self.model)]
            case "rllm-model-gateway":
                self.env, self.path = environment(), "/sessions/{key}/v1/chat/completions"
                program = str(python_of("rllm-model-gateway").with_name("rllm-model-gateway"))
                where = ["--host", "127.0.0.1", "--port", str(self.port), "--db-path", str(self.work / "traces.db")]
                return [program, *where, "--worker", f"{self.engine}/vllm/v1"]
        return []

    def _ours(self) -> list[str]:
        journal_id = journal_folder.prepare(self.work / "journal")
        settings = GatewaySettings(
            port=self.port,
            model=ModelConfig(path=self.model, name=MODEL, context_length=CONTEXT_LENGTH),
            engine_url=self.engine,
            secret=SECRET,
            control_key=CONTROL_KEY,
            journal=self.work / "journal",
            gateway={"tls_certificate": self.certificate, "tls_key": self.certificate},
        )
        self.stdin = settings.model_dump_json().encode()
        whole = {"run_id": "benchmark", "step": 0, "attempt": 1, "sampling": Sampling(), "journal_id": journal_id}
        whole["expires_at"] = time.time() + 3600
        claims = (SessionClaims(rollout_id=name, session_id=name, **whole) for name in self.keys)
        self.keys = [issue(SECRET, each) for each in claims]
        return [sys.executable, "-m", "rollout_backend.model.gateway"]


@contextlib.asynccontextmanager
async def opened(scenario: Scenario, model: Path, name: str) -> AsyncIterator[tuple[list[Session], int, Path]]:
    """Serve a system, and yield sessions that call it, its process's id, and its folder.

    Raises StartupError if the system does not start, and Unmeasured if the block does not end in time.
    """
    conversation, cores = Conversation(model, scenario), sorted(os.sched_getaffinity(0))
    engine_port, port = free_port(), free_port()
    with kept_folder() as work:
        keys = [f"session-{i}" for i in range(scenario.sessions)]
        system = System(port, f"http://127.0.0.1:{engine_port}", model, work, keys)
        argv = system.prepare(name)
        engine = [sys.executable, str(HERE / "engine_stub.py"), str(engine_port)]
        answers = json.dumps(conversation.answers(scenario.latency_s)).encode()
        async with contextlib.AsyncExitStack() as servers:
            serve = servers.enter_async_context
            pid = await serve(serving(engine, engine_port, work / "engine.log", cores[-1], stdin=answers))
            if argv:
                log = work / "gateway.log"
                pid = await serve(serving(argv, port, log, cores[0], env=system.env, stdin=system.stdin))
            url = f"http://127.0.0.1:{port if argv else engine_port}{system.path}"
            rest = conversation.rest | ({"stream": True} if scenario.stream else {})
            histories = [conversation.history(seed) for seed in range(HISTORIES)]
            sessions = [
                Session(url.format(key=key), key, histories[i % HISTORIES], rest, conversation.results(i))
                for i, key in enumerate(system.keys)
            ]
            os.sched_setaffinity(0, {cores[-1]})
            try:
                async with asyncio.timeout(scenario.limit_s):
                    yield sessions, pid, work
            except TimeoutError:
                raise Unmeasured(f"the calls were not answered within {scenario.limit_s:g} s") from None
            except (OSError, ValueError) as error:
                raise Unmeasured(f"a session could not be opened: {error}") from None
            finally:
                os.sched_setaffinity(0, cores)


async def measure(scenario: Scenario, model: Path, name: str) -> dict[str, Any]:
    async with opened(scenario, model, name) as (sessions, pid, _):
        found = await generate(sessions, pid, scenario.turns, scenario.rate, scenario.in_flight)
    took = found.pop("took")
    if scenario.rate is not None:
        cuts = statistics.quantiles([seconds - scenario.latency_s for seconds in took], n=100)
        found |= {"added_p50_ms": 1000 * cuts[49], "added_p99_ms": 1000 * cuts[98]}
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    model = find_model()
    allow_files(1500)
    gc.freeze()  # a collection of all modules would delay calls

    def one(system: str, scenario: Scenario) -> dict[str, Any] | None:
        wanted = SYSTEMS[system] if not options.smoke else SMOKE if system == "ours" else SMOKE[:1]
        return asyncio.run(measure(scenario, model, system)) if scenario in wanted else None

    compare(options.json, SYSTEMS, one, SMOKE if options.smoke else TABLE)


if __name__ == "__main__":
    main()
