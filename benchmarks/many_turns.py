"""Train a tiny model on two tasks of many turns, one with a tool, through the whole backend.

    .venv-verl/bin/python benchmarks/many_turns.py

Everything is real except the cloud, which is on this machine: SGLang, the gateway, a process for each agent, and the
trainer: verl's for `games/board_game.py`, the loop of `examples/plain_loop` for `games/rooms.py`. The model has
90,000 weights and one token per byte. First it is fitted to what a weak player does in the same agents. Each of five
seeds has different tasks; the engine samples without a seed.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, ROOT, arguments, write_section
from rivals.environments import python_of
from tiny_learner import fit, train
from verl_training import Training, batch_overrides

from agent_wrapper.contract import Rollout
from rollout_backend import RolloutManager, Task, load_config
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine, ToolCall

TRANSCRIPTS = 256
TIMEOUTS = {"model_call_s": 600, "agent_s": 900, "collection_s": 1800, "session_key_s": 2400}  # only end hangs
PINS = HERE / "games" / "requirements.txt"
_CELLS = re.compile(r"([wasd])([.HG#])")
_NOTE = re.compile(r"<tool_response>\n(\d)")
_draw = random.Random(0)  # not by the prompt: those of a room are equal


def weak_lake(prompt: str) -> str:
    """Move at random, but four times in ten to a free cell below or on the right, if there is one."""
    draw, cells = random.Random(prompt), dict(_CELLS.findall(prompt)[-4:])
    moves = list(cells)
    if draw.random() < 0.4:
        moves = [move for move in "sd" if cells[move] in ".G"] or moves
    return f"[{draw.choice(moves)}]"


def weak_rooms(prompt: str) -> str:
    """Read the note in a third of the cases, and follow it; otherwise choose any door."""
    if note := _NOTE.search(prompt):
        return note[1]
    return str(ToolCall("look")) if _draw.random() < 1 / 3 else _draw.choice("1234")


@dataclass(frozen=True)
class Game:
    """An agent with its tasks, a weak player to begin with, and how a model learns."""

    name: str
    agent: str
    player: Callable[[str], str]
    payload: dict[str, Any]  # of each task, besides its `seed`
    steps: int
    prompt_tokens: int
    response_tokens: int
    group: int
    learning_rate: float
    warm_steps: int = 0
    tails: tuple[tuple[int, int], ...] = ()  # see `fit`
    refits: tuple[int, ...] = ()  # steps of more fits, each with the learning rate of the start
    prompts: int = 8  # in a step

    def tasks(self, seed: int, count: int) -> list[Task]:
        """Return tasks whose ids and seeds no other seed has."""
        draw = random.Random(f"{self.name} {seed}")
        return [Task(f"{self.name}-{seed}-{i}", {**self.payload, "seed": draw.getrandbits(31)}) for i in range(count)]

    def cloud(self, work: Path) -> LocalCloud:
        """Return a cloud whose agents run in the environment of the games."""
        python, env = python_of("games", PINS), {"PYTHONPATH": str(ROOT)}
        return LocalCloud(HERE / "games" / self.agent, run_dir=work / "cloud", python=python, env=env)


LAKE = Game(
    "lake",
    "board_game.py",
    weak_lake,
    {"game": "FrozenLake-v0", "max_moves": 12, "compact_after": 4, "max_tokens": 6},
    warm_steps=110,
    steps=10,
    prompt_tokens=144,
    response_tokens=144,
    group=6,
    learning_rate=1.5e-3,
)
ROOMS = Game(
    "rooms",
    "rooms.py",
    weak_rooms,
    {"rooms": 3},
    steps=36,
    prompt_tokens=512,
    response_tokens=512,
    group=4,
    learning_rate=6e-4,
    tails=((44, 120), (112, 250)),  # the choice after a note; the call before
    refits=(250, 250),
)


@contextlib.asynccontextmanager
async def serve(game: Game, settings: dict[str, Any], work: Path) -> AsyncIterator[RolloutManager]:
    """Yield a manager without verl, and a cloud for its agents."""
    base = {"run_id": "many-turns", "output_dir": str(work / "runs"), "timeouts": TIMEOUTS, **settings}
    async with game.cloud(work) as cloud:
        os.environ.update(cloud.environ)
        async with RolloutManager(load_config(base=base, env={}, top=cloud.settings())) as manager:
            yield manager


async def play(game: Game, work: Path, transcripts: int = TRANSCRIPTS) -> list[Rollout]:
    """Return what the weak player does in this many tasks."""
    with ScriptedEngine(game.player) as engine:
        context = game.prompt_tokens + game.response_tokens
        settings = {
            "model": {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": context},
            "serving": {"kind": "external", "urls": [engine.url]},
            "group": {"size": 1},
        }
        async with serve(game, settings, work) as manager:
            return (await manager.collect(game.tasks(-1, transcripts))).rollouts


Steps = list[dict[str, float]]


async def train_with_verl(
    game: Game, model: Path, seeds: Sequence[int], steps: int, work: Path
) -> AsyncIterator[Steps]:
    """Train one seed after the other with verl, each in a process of its own. Yield the steps of each."""
    own = [
        *batch_overrides(
            game.prompts, game.group, game.group * 4, game.prompts // 2, game.response_tokens, game.learning_rate
        ),
        f"data.max_prompt_length={game.prompt_tokens}",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    ]
    for seed in seeds:
        training = Training(work / str(seed), model, steps)
        training.work.mkdir(parents=True)
        tasks = (json.dumps(task.as_row()) + "\n" for task in game.tasks(seed, game.prompts * steps))
        training.tasks.write_text("".join(tasks))
        async with game.cloud(training.work) as cloud:
            runs = training.work / "runs"
            through = training.through_backend({**cloud.settings(), "output_dir": str(runs), "timeouts": TIMEOUTS})
            logged = await training.run([*through, *own], {"OMP_NUM_THREADS": "1", **cloud.environ})
        [steps_folder] = runs.glob("*/steps")  # .secrets is beside it
        archive, found = RunArchive(steps_folder.parent), []
        for step, measured in zip(archive.steps(), logged, strict=True):
            rollouts = [archive.read_result(record) for record in archive.read_records(step) if record.trained]
            prob_diff, seconds = measured["training/rollout_probs_diff_max"], measured["timing_s/step"]
            found.append({**summary_of(rollouts), "prob_diff": prob_diff, "seconds": seconds})
        archive.close()
        yield found


async def train_plainly(
    game: Game, model: Path, seeds: Sequence[int], steps: int, work: Path
) -> AsyncIterator[Steps]:
    """Train one seed after the other with the loop of `examples/plain_loop`, one engine and one gateway."""
    settings = {
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 1.0},
        "group": {"size": game.group},
    }
    async with serve(game, settings, work) as manager:
        for seed in seeds:
            size, tasks = game.prompts, game.tasks(seed, game.prompts * steps)
            planned = [tasks[at : at + size] for at in range(0, len(tasks), size)]
            found = []
            async for result, worst, seconds in train(manager, model, planned, game.learning_rate):
                rollouts = [rollout for group in result.groups if group.usable for rollout in group.rollouts]
                found.append({**summary_of(rollouts), "prob_diff": worst, "seconds": seconds})
            yield found


TRAININGS = ((LAKE, train_with_verl), (ROOMS, train_plainly))


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
    began, runs = time.monotonic(), []
    versions = dict(pin.split("==") for pin in PINS.read_text().split())
    settings: dict[str, Any] = {"transcripts": TRANSCRIPTS}
    for game, _ in TRAININGS:
        named = ("prompts", "group", "learning_rate", "warm_steps")
        settings[game.name] = {**{name: getattr(game, name) for name in named}, **game.payload}
    for game, train_seeds in TRAININGS:
        model = work / game.name / "model"
        played = await play(game, work / game.name / "player")
        rows = [(list(s.token_ids), list(s.response_mask)) for rollout in played for s in rollout.segments]
        fit(model, rows, game.warm_steps, tails=game.tails)
        for steps in game.refits:
            fit(model, rows, steps)
        seeds, steps = (range(1), 2) if options.smoke else (range(5), game.steps)
        trained = train_seeds(game, model, seeds, steps, work / game.name / "training")
        for seed in seeds:
            runs.append({"name": game.name, "seed": seed, "steps": await anext(trained)})
            print(game.name, seed, *(f"{step['reward']:.2f}" for step in runs[-1]["steps"]), flush=True)
            results = {"versions": {"textarena": versions["TextArena"]}, "settings": settings, "runs": runs}
            command = ".venv-verl/bin/python benchmarks/many_turns.py"
            write_section(options.json, "many_turns", command, time.monotonic() - began, results)
        await trained.aclose()


def main() -> None:
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as work:
        asyncio.run(run(options, Path(work)))


if __name__ == "__main__":
    main()
