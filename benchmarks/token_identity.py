"""Check that the tokens trained are the tokens sampled: `python benchmarks/token_identity.py`.

Requires `rollout engine install`. An agent with a tool runs the same tasks twice on a real engine in float32: once
the gateway extends the conversation's tokens (the bridge), once it re-renders all messages for each call. The
benchmark counts the rows and tokens that a trainer would get, and compares each logprob with a plain forward pass of
the same weights.
"""

import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from common import Table, arguments

from agent_wrapper.contract import Sampling, Segment, Trajectory
from rollout_backend.config import EngineName, ModelConfig, ServingConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.server import create_app
from rollout_backend.model.rendering.chatml import ChatMLRenderer
from rollout_backend.model.rendering.guarded_renderer import RendererBundle
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.model.serving.install import find_engine, find_model
from rollout_backend.model.serving.local_engine import LocalEngine
from rollout_backend.model.serving.run_secret import model_endpoint
from rollout_backend.testing.forward_pass import reference_logprobs

AT_ONCE = 8
QUESTIONS = 3
MAX_CALLS = 8
SECRET, CONTROL_KEY = "benchmark-" * 4, "controlled-" * 4
BRIDGED, RERENDERED = "chatml", "token_identity.Rerendered"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Evaluates an arithmetic expression.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": CALCULATOR}]


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
    numbers, messages, calls = random.Random(seed), examples(), 0
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
    """What a trainer would get of all rollouts with one renderer."""

    trajectories: list[Trajectory]
    retokenized: list[int]  # sampled tokens of each turn that has others when its messages are rendered again
    worst_difference: float = math.nan  # in probability, against a forward pass

    @property
    def segments(self) -> list[Segment]:
        return [segment for trajectory in self.trajectories for segment in trajectory.segments]

    @property
    def tool_calls(self) -> int:
        last = [trajectory.segments[-1].messages[len(examples()) :] for trajectory in self.trajectories]
        return sum("tool_calls" in message for messages in last for message in messages)

    def counts(self) -> Mapping[str, int]:
        return {
            "rollouts": len(self.trajectories),
            "model calls": sum(len(segment.turns) for segment in self.segments),
            "of them with a tool call": self.tool_calls,
            "rows": len(self.segments),
            "sampled tokens, each trained once": sum(segment.sampled_tokens for segment in self.segments),
            "calls whose history, when re-rendered, has other tokens than were sampled": len(self.retokenized),
            "sampled tokens in those histories": sum(self.retokenized),
        }


def retokenized(segments: Sequence[Segment], bundle: RendererBundle) -> list[int]:
    """Return how many sampled tokens each turn has that a trainer would lose by rendering the messages itself."""
    found = []
    for segment in segments:
        replies = [i for i, message in enumerate(segment.messages) if message["role"] == "assistant"]
        for turn, at in zip(reversed(segment.turns), reversed(replies), strict=False):
            before = bundle.render(segment.messages[:at], TOOLS)
            after = list(bundle.renderer.render_ids(segment.messages[: at + 1], tools=TOOLS))
            sampled = segment.token_ids[turn.start : turn.end].tolist()
            if after[len(before) :][: len(sampled)] != sampled:
                found.append(len(sampled))
    return found


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
    renderer: str,
    rollouts: int,
    engine_url: str,
    model_path: Path,
    engine: EngineName = "sglang",
    context_length: int = 2048,
    max_tokens: int = 48,
) -> Measured:
    """Run the agent's rollouts, `AT_ONCE` at a time, each with its own seed."""
    model = ModelConfig(path=model_path, name="model", renderer=renderer, context_length=context_length)
    bundle, free = load_renderer(model), asyncio.Semaphore(AT_ONCE)
    keys = {"secret": SECRET, "control_key": CONTROL_KEY}
    # The port does not matter: the gateway is called in this process.
    settings = GatewaySettings(
        port=1, model=model, engine_name=engine, engine_url=engine_url, model_call_s=600, **keys
    )
    app = create_app(settings, bundle)

    async def roll(number: int) -> Trajectory:
        claims = SessionClaims(
            run_id="token-identity",
            step=0,
            rollout_id=f"task-{number}.0",
            attempt=1,
            session_id=f"session-{number}",
            sampling=Sampling(temperature=1.0, max_tokens=max_tokens, seed=number),
            expires_at=time.time() + 7200,
        )
        endpoint = model_endpoint("http://gateway", model.served_name, SECRET, claims)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        key = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
        async with free, openai.AsyncOpenAI(**key, timeout=600, http_client=http) as client:
            await converse(client, model.served_name, number)
            sealed = await http.post(endpoint.trajectory_url, headers={"Authorization": f"Bearer {endpoint.api_key}"})
            return Trajectory.decode(sealed.raise_for_status().content)

    async with app.router.lifespan_context(app):
        trajectories = await asyncio.gather(*(roll(number) for number in range(rollouts)))
    return Measured(
        trajectories, retokenized([segment for each in trajectories for segment in each.segments], bundle)
    )


async def run(rollouts: int, model: Path) -> list[Measured]:
    config = ModelConfig(path=model, context_length=2048)
    serving = ServingConfig(kind="process", device="cpu", dtype="float32", threads=2, max_running_requests=AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine("the engine", config, serving, Path(folder) / "engine.log")
        try:
            await engine.start()
            return [await measure(renderer, rollouts, engine.url, model) for renderer in (BRIDGED, RERENDERED)]
        finally:
            await engine.stop()


def main() -> None:
    options = arguments(__doc__).parse_args()
    sys.modules["token_identity"] = sys.modules[__name__]  # the setting names the renderer by this module
    results = asyncio.run(run(2 if options.smoke else 64, find_model()))
    check_logprobs(results, find_model())  # after the engine has stopped: a small machine may not hold both
    counts = [measured.counts() for measured in results]
    lines = [[name, *(f"{each[name]:,}" for each in counts)] for name in counts[0]]
    worst = [f"{measured.worst_difference:.1e}" for measured in results]
    lines.append(["worst difference of a sampled token's probability from the forward pass", *worst])
    print(Table(("", "bridged", "re-rendered"), lines).markdown())


if __name__ == "__main__":
    main()
