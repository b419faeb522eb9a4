"""Check that the tokens trained are the tokens sampled: `python benchmarks/token_identity.py`.

Requires `rollout engine install`. An agent with a tool runs the same tasks twice on a real engine in float32: once
the gateway extends the conversation's tokens (the bridge), once it re-renders all messages for each call. The
benchmark counts the rows and tokens that a trainer would get, and compares each logprob with a plain forward pass of
the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn
from rich.console import Console
from rich.table import Table

from agent_wrapper.contract import Sampling, Segment, Trajectory
from rollout_backend.config import EngineName, ModelConfig, ServingConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.server import create_app
from rollout_backend.rendering.chatml import ChatMLRenderer
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from rollout_backend.serving.install import find_engine, find_model
from rollout_backend.serving.local_engine import LocalEngine
from rollout_backend.serving.run_secret import model_endpoint
from rollout_backend.serving.server_process import free_port
from rollout_backend.testing.forward_pass import reference_logprobs

AT_ONCE = 8
QUESTIONS = 3
MAX_CALLS = 8
MAX_TOKENS = 48
CONTEXT_LENGTH = 2048
SECRET, CONTROL_KEY = "benchmark-" * 4, "controlled-" * 4
BRIDGED, RERENDERED = "chatml", "token_identity.Rerendered"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": PARAMETERS,
        },
    }
]


class Rerendered(ChatMLRenderer):
    """Never extends a conversation: each prompt is rendered from all messages, as a chat completions server does."""

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None


# --- the agent --------------------------------------------------------------------------------------------


def examples() -> list[dict[str, Any]]:
    """Return example tool calls for the prompt. Without them the model would seldom make one."""
    shown: list[dict[str, Any]] = [{"role": "system", "content": "Work each problem out with the calculator."}]
    numbers = random.Random(7)
    for i in range(6):
        expression = problem(numbers)
        arguments = json.dumps({"expression": expression})
        function = {"name": "calculator", "arguments": arguments}
        shown += [
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "tool_calls": [{"id": f"c{i}", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": calculate(arguments)},
            {"role": "assistant", "content": f"Answer: {calculate(arguments)}"},
        ]
    return shown


def problem(numbers: random.Random) -> str:
    a, b, c = (numbers.randint(1, 99) for _ in range(3))
    return f"{a} + {b} - {c}"


def calculate(arguments: str) -> str:
    """Evaluate sums and differences. Return an error text for anything else, as tools do."""
    words = str(json.loads(arguments).get("expression")).split()
    try:
        return str(sum(int(sign + number) for sign, number in zip(["+", *words[1::2]], words[::2], strict=True)))
    except ValueError as error:
        return f"Error: {error}"


async def converse(client: openai.AsyncOpenAI, model: str, seed: int) -> None:
    """Ask several questions. A tool's result goes back to the model; a reply without a tool call ends a question."""
    numbers = random.Random(seed)
    messages = examples()
    calls = 0
    for _ in range(QUESTIONS):
        messages.append({"role": "user", "content": f"What is {problem(numbers)}?"})
        while calls < MAX_CALLS:
            calls += 1
            answer = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break


# --- what a trainer would get -----------------------------------------------------------------------------


@dataclass
class Measured:
    """The measurements over all rollouts with one renderer."""

    renderer: str
    rollouts: int
    trajectories: list[Trajectory]
    seconds: float
    retokenized_turns: int = 0  # turns whose re-rendered message differs from the sampled tokens
    retokenized_tokens: int = 0  # tokens sampled in those turns
    worst_difference: float = math.nan  # in probability, against a forward pass
    split_reasons: Counter[str] = field(default_factory=Counter)

    @property
    def segments(self) -> list[Segment]:
        return [segment for trajectory in self.trajectories for segment in trajectory.segments]

    @property
    def rows(self) -> int:
        return len(self.segments)

    @property
    def breaks(self) -> int:
        return self.rows - self.rollouts

    @property
    def broken_rollouts(self) -> int:
        return sum(len(trajectory.segments) > 1 for trajectory in self.trajectories)

    @property
    def turns(self) -> int:
        return sum(len(segment.turns) for segment in self.segments)

    @property
    def tool_calls(self) -> int:
        return sum("tool_calls" in message for message in self._replies)

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.sampled_tokens for segment in self.segments)

    @property
    def row_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def repeated_tokens(self) -> int:
        """Tokens that an earlier row of the same rollout has at the same position."""
        return sum(
            max((_common_prefix(segment, earlier) for earlier in trajectory.segments[:i]), default=0)
            for trajectory in self.trajectories
            for i, segment in enumerate(trajectory.segments)
        )

    @property
    def _replies(self) -> list[dict[str, Any]]:
        shown = len(examples())
        last = [trajectory.segments[-1].messages for trajectory in self.trajectories]
        return [message for messages in last for message in messages[shown:] if message["role"] == "assistant"]


def _common_prefix(segment: Segment, other: Segment) -> int:
    """Return the number of tokens that both begin with."""
    pairs = zip(segment.token_ids, other.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(segment.token_ids), len(other.token_ids)))


def count_retokenized(measured: Measured, bundle: RendererBundle) -> None:
    """Count the sampled tokens that a trainer would lose by rendering the messages itself."""
    for segment in measured.segments:
        replies = [i for i, message in enumerate(segment.messages) if message["role"] == "assistant"]
        for turn, at in zip(reversed(segment.turns), reversed(replies), strict=False):
            before = bundle.render(segment.messages[:at], TOOLS)
            after = list(bundle.renderer.render_ids(segment.messages[: at + 1], tools=TOOLS))
            sampled = segment.token_ids[turn.start : turn.end].tolist()
            if after[len(before) :][: len(sampled)] != sampled:
                measured.retokenized_turns += 1
                measured.retokenized_tokens += len(sampled)


def check_logprobs(results: Sequence[Measured], model: Path) -> None:
    """Compare the recorded logprobs with those of a forward pass of the same weights."""
    sequences = [segment.token_ids.tolist() for measured in results for segment in measured.segments]
    reference = iter(reference_logprobs(find_engine(), model, sequences))
    for measured in results:
        measured.worst_difference = max(
            abs(math.exp(stored) - math.exp(known))
            for segment in measured.segments
            for stored, known, sampled in zip(segment.logprobs, next(reference), segment.response_mask, strict=True)
            if sampled
        )


# --- gateway and engine -----------------------------------------------------------------------------------


async def measure(
    renderer: str, rollouts: int, engine_url: str, model_path: Path, engine: EngineName = "sglang"
) -> Measured:
    """Run the agent's rollouts, `AT_ONCE` at a time, each with its own seed."""
    model = ModelConfig(path=model_path, name="model", renderer=renderer, context_length=CONTEXT_LENGTH)
    bundle = load_renderer(model)
    began = time.monotonic()
    async with serve_gateway(model, bundle, engine_url, engine) as url:
        free = asyncio.Semaphore(AT_ONCE)

        async def roll(number: int) -> Trajectory:
            endpoint = model_endpoint(url, model.served_name, SECRET, claims(number))
            async with (
                free,
                openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=600) as client,
            ):
                await converse(client, model.served_name, number)
                sealed = await client.with_options(max_retries=0).post("/rollout/trajectory", cast_to=_Bytes)
                return Trajectory.decode(sealed.content)

        trajectories = await asyncio.gather(*(roll(number) for number in range(rollouts)))
    measured = Measured(renderer, rollouts, trajectories, time.monotonic() - began)
    measured.split_reasons.update(segment.split_reason for segment in measured.segments)
    count_retokenized(measured, bundle)
    return measured


_Bytes = openai.HttpxBinaryResponseContent


def claims(number: int) -> SessionClaims:
    return SessionClaims(
        run_id="token-identity",
        step=0,
        rollout_id=f"task-{number}.0",
        attempt=1,
        session_id=f"session-{number}",
        sampling=Sampling(temperature=1.0, max_tokens=MAX_TOKENS, seed=number),
        expires_at=time.time() + 7200,
    )


@contextlib.asynccontextmanager
async def serve_gateway(
    model: ModelConfig, bundle: RendererBundle, engine_url: str, engine: EngineName
) -> AsyncIterator[str]:
    port = free_port()
    settings = GatewaySettings(
        port=port,
        model=model,
        engine_name=engine,
        engine_url=engine_url,
        secret=SECRET,
        control_key=CONTROL_KEY,
        model_call_s=600,
    )
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings, bundle), port=port, log_level="warning", access_log=False)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event to wait for
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def serve_engine(model_path: Path) -> AsyncIterator[str]:
    model = ModelConfig(path=model_path, context_length=CONTEXT_LENGTH)
    serving = ServingConfig(kind="process", device="cpu", dtype="float32", threads=2, max_running_requests=AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine("the engine", model, serving, Path(folder) / "engine.log")
        try:
            await engine.start()
            yield engine.url
        finally:
            await engine.stop()


# --- the table --------------------------------------------------------------------------------------------


def lines(measured: Measured) -> Mapping[str, str]:
    return {
        "rollouts": f"{measured.rollouts}",
        "model calls": f"{measured.turns}",
        "of them with a tool call": f"{measured.tool_calls}",
        "rows": f"{measured.rows}",
        "breaks": f"{measured.breaks}",
        "rollouts with a break": f"{measured.broken_rollouts}",
        "rows by split reason": ", ".join(f"{count} {why}" for why, count in sorted(measured.split_reasons.items())),
        "sampled tokens, each trained once": f"{measured.sampled_tokens}",
        "tokens in the rows": f"{measured.row_tokens}",
        "of them repeated from an earlier row": f"{measured.repeated_tokens}",
        "calls whose re-rendered tokens differ": f"{measured.retokenized_turns}",
        "sampled tokens in those": f"{measured.retokenized_tokens}",
        "worst difference from a forward pass": f"{measured.worst_difference:.1e}",
        "seconds": f"{measured.seconds:.0f}",
    }


async def run(rollouts: int, renderers: Sequence[str], model_path: Path) -> list[Measured]:
    async with serve_engine(model_path) as url:
        return [await measure(renderer, rollouts, url, model_path) for renderer in renderers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=64)
    args = parser.parse_args()
    sys.modules["token_identity"] = sys.modules[__name__]  # the setting names the renderer by this module
    results = asyncio.run(run(args.rollouts, (BRIDGED, RERENDERED), find_model()))
    check_logprobs(results, find_model())  # after the engine has stopped: a small machine may not hold both
    table = Table("", "bridged", "re-rendered")
    for name, *values in zip(lines(results[0]), *(lines(measured).values() for measured in results), strict=True):
        table.add_row(name, *values)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
