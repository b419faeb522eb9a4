"""Train a tiny model on a task of many turns, with a tool, through the whole backend.

    .venv-verl/bin/python benchmarks/many_turns.py

In each of a row of rooms, a tool reads a note with the number of the door that leads on (`rooms_agent.py`). A new
conversation, and so a new segment, begins in each room.

Everything is real except the cloud, which is on this machine: SGLang, the gateway, a process for each agent, and the
trainer, which is the loop of `examples/plain_loop`. The model has 90,000 weights and one token per byte. First it is
fitted to what a weak player does in the same agents. Each of five seeds has different tasks; the engine samples
without a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from common import HERE, arguments, write_section
from tiny_learner import fit, train

from agent_wrapper.contract import Rollout
from rollout_backend import RolloutManager, Task, load_config
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine, ToolCall

TRANSCRIPTS = 256
SETTINGS: dict[str, Any] = {"rooms": 3, "prompts": 8, "group": 4, "learning_rate": 6e-4, "steps": 36}
TAILS = ((44, 120), (112, 250))  # see `fit`: the choice after a note; the call before
REFITS = (250, 250)  # steps of more fits, each with the learning rate of the start
TIMEOUTS = {"model_call_s": 600, "agent_s": 900, "collection_s": 1800, "session_key_s": 2400}  # only end hangs
_draw = random.Random(0)  # not by the prompt: those of a room are equal
_NOTE = re.compile(r"<tool_response>\n(\d)")


def weak_player(prompt: str) -> str:
    """Read the note in a third of the cases, and follow it; otherwise choose any door."""
    if note := _NOTE.search(prompt):
        return note[1]
    return str(ToolCall("look")) if _draw.random() < 1 / 3 else _draw.choice("1234")


def tasks_of(seed: int, count: int) -> list[Task]:
    """Return tasks whose ids and seeds no other seed has."""
    draw = random.Random(f"rooms {seed}")
    return [
        Task(f"rooms-{seed}-{i}", {"rooms": SETTINGS["rooms"], "seed": draw.getrandbits(31)}) for i in range(count)
    ]


@contextlib.asynccontextmanager
async def serve(settings: dict[str, Any], work: Path) -> AsyncIterator[RolloutManager]:
    """Yield a manager, and a cloud for its agents."""
    base = {"run_id": "many-turns", "output_dir": str(work / "runs"), "timeouts": TIMEOUTS, **settings}
    async with LocalCloud(HERE / "rooms_agent.py", run_dir=work / "cloud") as cloud:
        os.environ.update(cloud.environ)
        async with RolloutManager(load_config(base=base, env={}, top=cloud.settings())) as manager:
            yield manager


async def play(work: Path) -> list[Rollout]:
    """Return what the weak player does."""
    with ScriptedEngine(weak_player) as engine:
        settings = {
            "model": {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": 1024},
            "serving": {"kind": "external", "urls": [engine.url]},
            "group": {"size": 1},
        }
        async with serve(settings, work) as manager:
            return (await manager.collect(tasks_of(-1, TRANSCRIPTS))).rollouts


async def train_seeds(model: Path, seeds: Sequence[int], steps: int, work: Path) -> AsyncIterator[dict[str, Any]]:
    """Train one seed after the other with one engine and one gateway. Yield the run of each."""
    settings = {
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 1.0},
        "group": {"size": SETTINGS["group"]},
    }
    async with serve(settings, work) as manager:
        for seed in seeds:
            size, tasks = SETTINGS["prompts"], tasks_of(seed, SETTINGS["prompts"] * steps)
            planned = [tasks[at : at + size] for at in range(0, len(tasks), size)]
            found = []
            async for result, worst, seconds in train(manager, model, planned, SETTINGS["learning_rate"]):
                rollouts = [rollout for group in result.groups if group.usable for rollout in group.rollouts]
                found.append({**summary_of(rollouts), "prob_diff": worst, "seconds": seconds})
                print(f"seed {seed}, step {len(found)}: {found[-1]['reward']:.2f}", flush=True)
            yield {"name": "rooms", "seed": seed, "steps": found}


def summary_of(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means over the trained rollouts of a step."""
    return {
        "rollouts": len(rollouts),
        "reward": statistics.fmean(rollout.reward or 0.0 for rollout in rollouts),
        "won": statistics.fmean(bool(rollout.extras["won"]) for rollout in rollouts),
        "turns": statistics.fmean(sum(len(s.turns) for s in rollout.segments) for rollout in rollouts),
        "segments": statistics.fmean(len(rollout.segments) for rollout in rollouts),
        "tool_calls": statistics.fmean(float(rollout.extras.get("tool_calls", 0)) for rollout in rollouts),
        "sampled_tokens": statistics.fmean(rollout.sampled_tokens for rollout in rollouts),
    }


async def run(options: Any, work: Path) -> None:
    began, model, runs = time.monotonic(), work / "model", []
    played = await play(work / "player")
    rows = [(list(s.token_ids), list(s.response_mask)) for rollout in played for s in rollout.segments]
    fit(model, rows, 0, tails=TAILS)
    for steps in REFITS:
        fit(model, rows, steps)
    seeds, steps = (options.seeds[:1], 2) if options.smoke else (options.seeds, SETTINGS["steps"])
    async for found in train_seeds(model, seeds, steps, work / "training"):
        runs.append(found)
        command = ".venv-verl/bin/python benchmarks/many_turns.py"
        results = {"settings": {"transcripts": TRANSCRIPTS, **SETTINGS}, "runs": runs}
        write_section(options.json, "many_turns", command, time.monotonic() - began, results)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        asyncio.run(run(options, Path(work)))


if __name__ == "__main__":
    main()
