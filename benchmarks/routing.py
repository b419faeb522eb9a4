"""Compare routing policies on two real engines: `python benchmarks/routing.py`.

Requires `rollout engine install`. An agent with a tool rolls out groups of 8, which share a prompt of about 940
tokens and extend it over 3 to 8 turns. Prompts, results of the tool and numbers of turns are drawn from a fixed seed,
with heavy tails. How many tokens each call samples is replayed from `RECORDED`, the sessions of a real model:
`--record` prints new ones. The engines of a replay serve a small model with random weights, which never ends a reply
by itself.

Each policy starts with empty prefix caches. The figures are medians over the repetitions, with the range.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
from token_identity import SECRET, serve_gateway

from agent_wrapper.contract import Sampling, Trajectory
from rollout_backend.config import ModelConfig, RouterConfig, RouterKind, ServingConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from rollout_backend.serving.install import find_engine, find_model
from rollout_backend.serving.local_engine import LocalEngine
from rollout_backend.serving.model_endpoint import model_endpoint
from rollout_backend.serving.router import router_command
from rollout_backend.serving.server_process import ServerProcess, free_port

ENGINES = 2
GROUPS, GROUP_SIZE = 6, 8
AT_ONCE = 24  # sessions
CONTEXT_LENGTH = 4096
MIN_TURNS, MAX_TURNS = 3, 8
MAX_REPLY = 48  # tokens
SAMPLE_S = 0.25  # between two samples of the engines' requests
LOOKUP = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Finds an order.", "parameters": LOOKUP}}]
CONSISTENT_HASHING = """
import sys
from sglang_router import launch_router
arguments = launch_router.parse_router_args(sys.argv[1:])
arguments.policy = "consistent_hashing"  # the command line does not offer it
launch_router.launch_router(arguments)
"""

MAKE_MODEL = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
source, folder = sys.argv[1:]
config = AutoConfig.from_pretrained(source)
small = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
config.update({**small, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64})
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
AutoTokenizer.from_pretrained(source).save_pretrained(folder)
"""
# Tokens of each call of sessions that SmolLM2-135M-Instruct sampled on the CPU.
_RECORDED = """
29 26 34 33 35 37 / 31 29 31 / 29 29 29 / 28 48 32 / 32 12 48 48 / 31 48 48 48 48 / 40 41 48 / 39 48 48 / 24
48 48 / 29 32 46 31 / 23 43 48 / 27 48 11 / 28 48 48 / 22 48 17 / 12 47 48 / 21 48 48 / 34 27 24 / 31 48 48 48
/ 25 26 24 25 25 25 24 21 / 48 48 15 / 26 21 21 / 25 18 22 48 48 / 27 43 45 / 39 48 48 / 25 27 17 / 48 48 48 /
24 29 39 / 16 21 21 / 35 40 48 / 43 32 31 / 21 28 30 20 / 25 27 27 27 / 35 48 48 / 33 33 48 / 14 19 23 21
"""
RECORDED = [[int(tokens) for tokens in session.split()] for session in _RECORDED.split("/")]

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """One way to route. `by_group`: the routing key names the group and not the session."""

    name: str
    policy: str
    by_group: bool = False
    options: tuple[str, ...] = ()
    router: RouterKind = "sglang-router"

    def command(self, port: int, engines: Sequence[str]) -> list[str]:
        argv = router_command(RouterConfig(kind=self.router), port, free_port(), 600)
        start, options = argv[:3], argv[3:]
        if self.policy == "consistent_hashing":
            start[1:] = ["-c", CONSISTENT_HASHING]
        else:
            options[options.index("--policy") + 1] = self.policy
        return [*start, *options, *self.options, "--worker-urls", *engines]


BALANCED = ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.2")
SETUPS = (
    Setup("manual, by session", "manual"),
    Setup("manual, by group", "manual", by_group=True),
    Setup("consistent hashing, by session", "consistent_hashing"),
    Setup("consistent hashing, by group", "consistent_hashing", by_group=True),
    Setup("cache_aware", "cache_aware"),
    Setup("balanced cache_aware", "cache_aware", options=BALANCED),
    Setup("round_robin", "round_robin"),
    Setup("smg: manual, by session", "manual", router="smg"),
    Setup("smg: manual, by group", "manual", by_group=True, router="smg"),
)

# --- sessions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One call of a session: what the agent says first, and how many tokens the model samples at most."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Group:
    prompt: Messages
    sessions: list[list[Turn]]


def make_groups(count: int, rules: int = 0) -> list[Group]:
    """Return the sessions of a step, with as many rules in all prompts. Replies are as long as recorded ones."""
    groups = []
    for index in range(count):
        found = orders(random.Random(index))
        numbers = range(index * GROUP_SIZE, (index + 1) * GROUP_SIZE)
        groups.append(Group(prompt_of(found, rules), [turns(found, number) for number in numbers]))
    return groups


def orders(draw: random.Random) -> dict[str, str]:
    """Return the orders of a group, by their number."""
    items, cities = ("lamp", "chair", "kettle", "carpet", "drill"), ("Oslo", "Lima", "Accra", "Hanoi", "Turin")

    def order() -> str:
        return f"{draw.choice(items)} to {draw.choice(cities)}, {draw.randint(5, 400)} EUR"

    return {f"{draw.randrange(10_000, 99_999)}": order() for _ in range(32)}


def prompt_of(found: dict[str, str], rules: int) -> Messages:
    """Return the prompt that the sessions of a group share: their orders, and two examples of a call."""
    table = "\n".join(f"{number}: {text}" for number, text in found.items())
    common = "\n".join(f"Rule {i}: never name the price of an order of the day {i}." for i in range(rules))
    system = f"{common}\nAnswer questions about these orders. Look each one up.\n{table}"
    messages: Messages = [{"role": "system", "content": system}]
    for i, number in enumerate([*found][:2]):
        function = {"name": "lookup", "arguments": json.dumps({"order": number})}
        messages += [
            {"role": "user", "content": f"Where is order {number}?"},
            {"role": "assistant", "tool_calls": [{"id": f"c{i}", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"{found[number]}; shipped"},
            {"role": "assistant", "content": f"Order {number} ({found[number]}) has been shipped."},
        ]
    return messages


def turns(found: dict[str, str], number: int) -> list[Turn]:
    """Return the turns of a session."""
    draw = random.Random(number)
    count = min(MAX_TURNS, MIN_TURNS - 1 + int(draw.paretovariate(1.2)))
    texts = [f"What about order {draw.choice([*found])}?", *(result(found, draw) for _ in range(count - 1))]
    recorded = itertools.cycle(RECORDED[number % len(RECORDED)])
    return [Turn(text, next(recorded)) for text in texts]


def result(found: dict[str, str], draw: random.Random) -> str:
    """Return what the tool says. Half of the results have one line, and some have 24."""
    hours = range(min(24, max(1, int(draw.paretovariate(0.9)))))
    log = "\n".join(f"{hour:02}:00 {draw.choice(('sorted', 'loaded', 'scanned', 'delayed'))}" for hour in hours)
    return f"{log}\nWhat about order {draw.choice([*found])}, and what is its price?"


async def say(client: openai.AsyncOpenAI, model: str, messages: Messages, turn: Turn) -> int:
    """Answer the model's last message, as a tool if it called one, and append its reply. Return its length."""
    calls = messages[-1].get("tool_calls")
    if calls:
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": turn.text} for call in calls]
    else:
        messages.append({"role": "user", "content": turn.text})
    reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=turn.tokens)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    assert reply.usage is not None
    return reply.usage.completion_tokens


async def record(gateway: str, model: str) -> None:
    """Roll out two groups with a real model, and print the lengths of its replies."""

    async def roll(number: int, group: Group) -> None:
        async with agent(gateway, model, claims(f"record-{number}", number)) as client:
            messages = [*group.prompt]
            whole = [replace(turn, tokens=MAX_REPLY) for turn in group.sessions[number % GROUP_SIZE]]
            print([await say(client, model, messages, turn) for turn in whole], flush=True)

    groups = make_groups(2)
    await asyncio.gather(*(roll(number, groups[number // GROUP_SIZE]) for number in range(2 * GROUP_SIZE)))


# --- a run ------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What one run of one setup came to."""

    seconds: float
    trajectories: list[Trajectory]
    loads: list[list[int]] = field(default_factory=list)  # requests of each engine, in each sample

    def tokens(self, *, first: bool | None = None) -> tuple[int, int]:
        """Return the prompt tokens and how many were cached: of all calls, of first ones, or of later ones."""
        turns = [
            turn
            for trajectory in self.trajectories
            for segment in trajectory.segments
            for i, turn in enumerate(segment.turns)
            if first is None or (i == 0) == first
        ]
        return sum(turn.start for turn in turns), sum(turn.cached_tokens or 0 for turn in turns)

    def hit(self, *, first: bool | None = None) -> float:
        prompt, cached = self.tokens(first=first)
        return cached / prompt

    @property
    def imbalance(self) -> float:
        """Return the mean requests of the busier engine, divided by the mean of all engines. 1 is even."""
        return statistics.mean(map(max, self.loads)) / statistics.mean(sum(each) / len(each) for each in self.loads)

    @property
    def idle(self) -> float:
        """Return the share of samples of single engines without a request."""
        return statistics.mean(not load for loads in self.loads for load in loads)

    def fields(self) -> dict[str, float]:
        prompt, cached = self.tokens()
        return {
            "hit": self.hit(),
            "hit_first": self.hit(first=True),
            "hit_later": self.hit(first=False),
            "computed": prompt - cached,
            "sampled": sum(segment.sampled_tokens for each in self.trajectories for segment in each.segments),
            "imbalance": self.imbalance,
            "idle": self.idle,
            "seconds": self.seconds,
        }


def claims(session_id: str, seed: int, routing_key: str = "") -> SessionClaims:
    return SessionClaims(
        run_id="routing",
        step=0,
        rollout_id=session_id,
        attempt=1,
        session_id=session_id,
        sampling=Sampling(temperature=1.0, max_tokens=MAX_REPLY, seed=seed),
        expires_at=time.time() + 7200,
        routing_key=routing_key,
    )


@contextlib.asynccontextmanager
async def agent(gateway: str, model: str, session: SessionClaims) -> AsyncIterator[openai.AsyncOpenAI]:
    endpoint = model_endpoint(gateway, model, SECRET, session)
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=600) as client:
        yield client


async def replay(gateway: str, model: str, groups: Sequence[Group], setup: Setup, run: str) -> list[Trajectory]:
    """Run every session, in the order of their groups, at most `AT_ONCE` at the same time."""
    free = asyncio.Semaphore(AT_ONCE)

    async def roll(group: int, number: int) -> Trajectory:
        session = f"{run}-{group}-{number}"
        key = f"{run}-{group}" if setup.by_group else ""
        async with free, agent(gateway, model, claims(session, group * GROUP_SIZE + number, key)) as client:
            messages = [*groups[group].prompt]
            for turn in groups[group].sessions[number]:
                await say(client, model, messages, turn)
            sealed = await client.post("/rollout/trajectory", cast_to=openai.HttpxBinaryResponseContent)
            return Trajectory.decode(sealed.content)

    each = [(i, j) for i, group in enumerate(groups) for j in range(len(group.sessions))]
    return await asyncio.gather(*(roll(i, j) for i, j in each))


async def sample(http: aiohttp.ClientSession, engines: Sequence[str], loads: list[list[int]]) -> None:
    """Add a sample of each engine's requests, running and waiting, until cancelled."""

    async def load(url: str) -> int:
        async with http.get(f"{url}/v1/loads?include=core") as reply:
            return sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in (await reply.json())["loads"])

    while True:
        found = await asyncio.gather(*map(load, engines))
        if any(found):
            loads.append(found)
        await asyncio.sleep(SAMPLE_S)


async def measure(
    setup: Setup,
    groups: Sequence[Group],
    model: ModelConfig,
    bundle: RendererBundle,
    engines: Sequence[str],
    run: str,
) -> Measured:
    port = free_port()
    loads: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        router = ServerProcess("the router", setup.command(port, engines), Path(folder) / "router.log")
        async with aiohttp.ClientSession() as http:

            async def ready() -> bool:
                try:
                    async with http.get(f"http://127.0.0.1:{port}/workers") as reply:
                        workers = (await reply.json())["workers"]
                except aiohttp.ClientError:
                    return False
                return sum(worker["is_healthy"] for worker in workers) == len(engines)

            try:
                await router.start()
                await router.wait_healthy(ready, 60)
                for url in engines:
                    async with http.post(f"{url}/flush_cache") as reply:
                        reply.raise_for_status()
                async with serve_gateway(model, bundle, f"http://127.0.0.1:{port}", "sglang") as gateway:
                    sampling = asyncio.create_task(sample(http, engines, loads))
                    began = time.monotonic()
                    trajectories = await replay(gateway, model.served_name, groups, setup, run)
                    seconds = time.monotonic() - began
                    sampling.cancel()
                    await asyncio.gather(sampling, return_exceptions=True)
            finally:
                await router.stop()
    return Measured(seconds, trajectories, loads)


@contextlib.asynccontextmanager
async def serve_engines(model: ModelConfig, kv_tokens: int) -> AsyncIterator[list[str]]:
    serving = ServingConfig(
        device="cpu", dtype="float32", threads=1, max_running_requests=AT_ONCE, max_total_tokens=kv_tokens
    )
    with tempfile.TemporaryDirectory() as folder:
        engines = [LocalEngine(f"engine-{i}", model, serving, Path(folder) / f"{i}.log") for i in range(ENGINES)]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            yield [engine.url for engine in engines]
        finally:
            await asyncio.gather(*(engine.stop() for engine in engines))


# --- the table --------------------------------------------------------------------------------------------


def lines(results: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    yield "| policy | cache hits | of first calls | prompt tokens computed | imbalance | engine idle | seconds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, runs in results.items():

        def cell(key: str, form: str, runs: Sequence[dict[str, float]] = runs) -> str:
            values = [run[key] for run in runs]
            middle, low, high = statistics.median(values), min(values), max(values)
            return f"{middle:{form}} ({low:{form}} to {high:{form}})"

        yield (
            f"| {name} | {cell('hit', '.1%')} | {cell('hit_first', '.1%')} | {cell('computed', ',.0f')} "
            f"| {cell('imbalance', '.2f')} | {cell('idle', '.0%')} | {cell('seconds', '.1f')} |"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=32_768, help="of each engine's cache")
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--rules", type=int, default=0, help="of 18 tokens, with which every prompt begins")
    parser.add_argument("--only", nargs="+", help="setups whose names begin so")
    parser.add_argument("--json", type=Path, help="also write the figures of each run to this file")
    parser.add_argument("--record", action="store_true", help="print the lengths of replies of the real model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = find_model()
        if not args.record:
            subprocess.run([find_engine(), "-c", MAKE_MODEL, path, folder], check=True)
            path = Path(folder)
        await run(args, ModelConfig(path=path, name="model", renderer="chatml", context_length=CONTEXT_LENGTH))


async def run(args: argparse.Namespace, model: ModelConfig) -> None:
    bundle = load_renderer(model)
    setups = [setup for setup in SETUPS if not args.only or setup.name.startswith(tuple(args.only))]
    results: dict[str, list[dict[str, float]]] = {setup.name: [] for setup in setups}
    async with serve_engines(model, args.kv_tokens) as engines:
        if args.record:
            async with serve_gateway(model, bundle, engines[0], "sglang") as gateway:
                await record(gateway, model.served_name)
            return
        groups = make_groups(args.groups, args.rules)
        # The repetitions of a setup are apart, so that a busy machine affects all setups.
        for repetition, setup in itertools.product(range(args.repetitions), setups):
            name = f"{setups.index(setup)}-{repetition}"
            found = (await measure(setup, groups, model, bundle, engines, name)).fields()
            results[setup.name].append(found)
            print(setup.name, {name: round(value, 3) for name, value in found.items()}, file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    for line in lines(results):
        print(line)


if __name__ == "__main__":
    asyncio.run(main())
