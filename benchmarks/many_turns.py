"""Train a tiny model on two tasks of many turns, one with a tool, through the whole backend.

    .venv-verl/bin/python benchmarks/many_turns.py

- FrozenLake-v0 of TextArena: a move per turn, and the agent replaces its conversation by a summary after every fourth
  turn, so that a rollout has several segments.
- Rooms: in each, a tool reads a note with the number of the door that leads on. A new conversation, and so a new
  segment, begins in each room.

Everything is real except the cloud, which is on this machine: SGLang, the gateway, a process for each agent, and the
trainer: verl's for the lake, the loop of `examples/plain_loop` for the rooms. The model has 90,000 weights and one
token per byte. First it is fitted to what a weak player does in the same agents. Each of five seeds has different
tasks; the engine samples without a seed.

Each run is kept in a file of `--runs` and is not repeated: after an interruption, start the script again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rivals.environments import python_of
from run_all import machine
from tiny_learner import fit, train

from agent_wrapper.contract import Rollout
from rollout_backend import RolloutManager, StepResult, Task, load_config
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine, ToolCall
from rollout_backend.results.archive import RunArchive
from rollout_backend.serving.server_process import ServerProcess
from rollout_backend.verl.verl_settings import run_id_of

Steps = list[dict[str, float]]  # what `summary_of` and a trainer say of each step

ROOT = Path(__file__).parent.parent
GAMES = Path(__file__).parent / "games"
PINS = GAMES / "requirements.txt"
EXAMPLE = ROOT / "examples" / "train_arithmetic"
SEEDS = (0, 1, 2, 3, 4)
TRANSCRIPTS = 256
TIMEOUTS = {"model_call_s": 600, "agent_s": 900, "collection_s": 1800, "session_key_s": 2400}  # only end hangs


# --- weak players, which make legal moves and few good ones ---

_CELLS = re.compile(r"([wasd])([.HG#])")


def weak_lake(prompt: str) -> str:
    """Move at random, but four times in ten to a free cell below or on the right, if there is one."""
    draw, cells = random.Random(prompt), dict(_CELLS.findall(prompt)[-4:])
    moves = list(cells)
    if draw.random() < 0.4:
        moves = [move for move in "sd" if cells[move] in ".G"] or moves
    return f"[{draw.choice(moves)}]"


_draw = random.Random(0)  # not by the prompt: those of a room are equal
_NOTE = re.compile(r"<tool_response>\n(\d)")


def weak_rooms(prompt: str) -> str:
    """Read the note in a third of the cases, and follow it; otherwise choose any door."""
    if note := _NOTE.search(prompt):
        return note[1]
    return str(ToolCall("look")) if _draw.random() < 1 / 3 else _draw.choice("1234")


# --- trainings ---


@dataclass(frozen=True)
class Training:
    """What is trained: an agent with its tasks, a weak player to begin with, and verl's settings."""

    name: str
    agent: str
    player: Callable[[str], str]
    payload: dict[str, Any]  # of each task, besides its `seed`
    warm_steps: int
    steps: int
    prompt_tokens: int
    response_tokens: int
    prompts: int = 8
    group: int = 6
    learning_rate: float = 1.5e-3
    plain: bool = False  # with the loop of `examples/plain_loop` instead of verl's trainer
    tails: tuple[tuple[int, int], ...] = ()  # see `fit`
    refits: tuple[int, ...] = ()  # steps of more fits, each with the learning rate of the start

    def tasks(self, seed: int, count: int) -> list[Task]:
        """Return tasks whose ids and seeds no other seed has."""
        draw = random.Random(f"{self.name} {seed}")
        return [Task(f"{self.name}-{seed}-{i}", {**self.payload, "seed": draw.getrandbits(31)}) for i in range(count)]

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.response_tokens


LAKE = Training(
    "lake",
    "board_game.py",
    weak_lake,
    {"game": "FrozenLake-v0", "max_moves": 12, "terse": True, "compact_after": 4, "max_tokens": 6},
    warm_steps=110,
    steps=10,
    prompt_tokens=144,
    response_tokens=144,
)
ROOMS = Training(
    "rooms",
    "rooms.py",
    weak_rooms,
    {"rooms": 3},
    warm_steps=0,
    steps=36,
    group=4,
    learning_rate=6e-4,
    plain=True,
    prompt_tokens=512,
    response_tokens=512,
    tails=((44, 120), (112, 250)),  # the choice after a note; the call before
    refits=(250, 250),
)
TRAININGS = {training.name: training for training in (LAKE, ROOMS)}


# --- rollouts -------------------------------------------------------------------------------------------------


def local_cloud(agent: str, work: Path) -> LocalCloud:
    """Return a cloud whose agents run in the environment of the games."""
    python = python_of("games", PINS)
    return LocalCloud(GAMES / agent, run_dir=work / "cloud", python=python, env={"PYTHONPATH": str(ROOT)})


@contextlib.asynccontextmanager
async def serve(training: Training, settings: dict[str, Any], work: Path) -> AsyncIterator[RolloutManager]:
    """Yield a manager without verl, and a cloud for its agents."""
    base = {"run_id": PROJECT, "output_dir": str(work / "runs"), "timeouts": TIMEOUTS, **settings}
    async with local_cloud(training.agent, work) as cloud:
        os.environ.update(cloud.environ)
        async with RolloutManager(load_config(base=base, env={}, top=cloud.settings())) as manager:
            yield manager


async def play(training: Training, work: Path) -> StepResult:
    """Collect what the weak player does."""
    with ScriptedEngine(training.player) as engine:
        settings = {
            "model": {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": training.context},
            "serving": {"kind": "external", "urls": [engine.url]},
            "group": {"size": 1},
        }
        async with serve(training, settings, work) as manager:
            return await manager.collect(training.tasks(-1, TRANSCRIPTS))


def warm_model(training: Training, folder: Path, work: Path) -> Path:
    """Return the model that imitates the weak player, and make it in `folder` unless it is there."""
    if folder.is_dir():
        return folder
    played = asyncio.run(play(training, _emptied(work)))
    rows = [(list(s.token_ids), list(s.response_mask)) for rollout in played.rollouts for s in rollout.segments]
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    losses = fit(part, rows, training.warm_steps, tails=training.tails)
    for steps in training.refits:
        losses += fit(part, rows, steps)
    print(f"{training.name}: fitted to {len(rows)} segments, loss {losses[0]:.2f} -> {losses[-1]:.2f}", flush=True)
    part.rename(folder)
    return folder


# --- training -------------------------------------------------------------------------------------------------


PROJECT = "many-turns"


def example_module() -> Any:
    """Return the script of `examples/train_arithmetic`, with its settings for verl."""
    sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module("train")


def overrides(training: Training, model: Path, tasks: Path, settings: Path, steps: int, work: Path) -> list[str]:
    """Return the settings of `examples/train_arithmetic` for verl, with those of this training."""
    example = example_module()
    options = argparse.Namespace(tiny=True, dtype="float32", trainer="v1", steps=steps, work=work)
    rollout, actor, rows = example.ROLLOUT, example.ACTOR, training.group * 4
    return [
        *example.training_overrides(options, model),
        *example.backend_overrides(tasks, settings),
        *example.cpu_overrides(options),
        f"data.train_batch_size={training.prompts}",
        f"data.max_prompt_length={training.prompt_tokens}",
        f"data.max_response_length={training.response_tokens}",
        f"{rollout}.n={training.group}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={rows}",
        f"{actor}.ppo_mini_batch_size={training.prompts // 2}",
        f"{actor}.ppo_micro_batch_size_per_gpu={rows}",
        f"{actor}.optim.lr={training.learning_rate}",
        f"{actor}.optim.lr_scheduler_type=cosine",
        f"{actor}.entropy_coeff=0",
        f"trainer.project_name={PROJECT}",
        f"hydra.run.dir={work}",
        "hydra.output_subdir=null",
    ]


async def train_with_verl(
    training: Training, model: Path, seeds: Sequence[int], steps: int, work: Path
) -> AsyncIterator[Steps]:
    """Train one seed after the other with verl, each in a process of its own. Yield the steps of each."""
    for seed in seeds:
        yield await _run_verl(training, model, seed, steps, _emptied(work / f"{training.name}-{seed}"))


async def _run_verl(training: Training, model: Path, seed: int, steps: int, work: Path) -> Steps:
    tasks = work / "tasks.jsonl"
    rows = (task.as_row() for task in training.tasks(seed, training.prompts * steps))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with local_cloud(training.agent, work) as cloud:
        settings = work / "rollout_backend.yaml"
        tree = {**cloud.settings(), "output_dir": str(work / "runs"), "timeouts": TIMEOUTS}
        settings.write_text(yaml.safe_dump(tree))
        metrics = work / "metrics.jsonl"
        verl = ServerProcess(
            "verl",
            [
                *(sys.executable, "-m", "verl.trainer.main_ppo"),
                *overrides(training, model, tasks, settings, steps, work),
            ],
            work / "verl.log",
            {**example_module().environment(threads=1), **cloud.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
        )
        await verl.start()
        try:
            await verl.wait()
        finally:
            await verl.stop(grace_s=20)
        if verl.returncode:
            raise SystemExit(f"verl ended with code {verl.returncode}. {verl.log_tail()}")
    run_id = run_id_of({"project_name": PROJECT, "experiment_name": work.name})
    archive = RunArchive(work / "runs" / run_id)
    found = []
    for step, line in zip(archive.steps(), metrics.read_text().splitlines(), strict=True):
        rollouts = [archive.read_result(record) for record in archive.read_records(step) if record.trained]
        measured = json.loads(line)["data"]
        found.append(
            {
                **summary_of(rollouts),
                "prob_diff": measured["training/rollout_probs_diff_max"],
                "seconds": measured["timing_s/step"],
            }
        )
    archive.close()
    return found


async def train_plainly(
    training: Training, model: Path, seeds: Sequence[int], steps: int, work: Path
) -> AsyncIterator[Steps]:
    """Train one seed after the other with the loop of `examples/plain_loop`, one engine and one gateway."""
    work = _emptied(work / training.name)
    settings = {
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 1.0},
        "group": {"size": training.group},
    }
    async with serve(training, settings, work) as manager:
        for seed in seeds:
            size, tasks = training.prompts, training.tasks(seed, training.prompts * steps)
            planned = [tasks[at : at + size] for at in range(0, len(tasks), size)]
            found = []
            async for result, worst, seconds in train(manager, model, planned, training.learning_rate):
                rollouts = [rollout for group in result.groups if group.usable for rollout in group.rollouts]
                found.append({**summary_of(rollouts), "prob_diff": worst, "seconds": seconds})
                print(f"{training.name} {seed}, step {len(found)}: {found[-1]['reward']:.2f}", flush=True)
            yield found


def _emptied(work: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "results" / "many_turns", help="finished runs")
    parser.add_argument("--smoke", action="store_true", help="two steps of one seed")
    parser.add_argument("--json", type=Path, help="write all finished runs to this file")
    options = parser.parse_args()
    runs: Path = options.runs.absolute() / ("smoke" if options.smoke else "")
    (runs / "models").mkdir(parents=True, exist_ok=True)
    seeds = options.seeds[:1] if options.smoke else options.seeds
    for name in options.only:
        missing = [seed for seed in seeds if not (runs / f"{name}-{seed}.json").exists()]
        if missing:
            model = warm_model(TRAININGS[name], runs / "models" / name, runs / "work" / f"{name}-player")
            asyncio.run(train_seeds(TRAININGS[name], model, missing, runs, options.smoke))
        for seed in seeds:
            print(line(json.loads((runs / f"{name}-{seed}.json").read_text())), flush=True)
    if options.json is not None:
        found = [json.loads(file.read_text()) for file in sorted(runs.glob("*.json"))]
        options.json.write_text(json.dumps(section(found), indent=1) + "\n")


async def train_seeds(training: Training, model: Path, seeds: Sequence[int], runs: Path, smoke: bool) -> None:
    """Train one seed after the other, and keep each in a file."""
    train_all = train_plainly if training.plain else train_with_verl
    began = time.monotonic()
    trained = train_all(training, model, seeds, 2 if smoke else training.steps, runs / "work")
    for seed in seeds:
        found = {"name": training.name, "seed": seed, "steps": await anext(trained)}
        found |= {"date": datetime.now(UTC).date().isoformat(), "seconds": round(time.monotonic() - began)}
        (runs / f"{training.name}-{seed}.json").write_text(json.dumps(found, indent=1) + "\n")
        began = time.monotonic()
    await trained.aclose()


def line(found: dict[str, Any]) -> str:
    rewards = " ".join(f"{step['reward']:.2f}" for step in found["steps"])
    return f"{found['name']} {found['seed']}, {found['seconds']} s: {rewards}"


def section(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `docs/make_results.py` takes."""
    trained = ("prompts", "group", "learning_rate", "warm_steps")
    pins = dict(pin.split("==") for pin in PINS.read_text().split())
    return {
        "section": "many_turns",
        "date": " and ".join(sorted({run["date"] for run in runs})),
        "machine": machine(),
        "command": ".venv-verl/bin/python benchmarks/many_turns.py",
        "seconds": sum(run["seconds"] for run in runs),
        "results": {
            "versions": {"textarena": pins["TextArena"]},
            "settings": {
                "transcripts": TRANSCRIPTS,
                **{
                    name: {**{field: getattr(training, field) for field in trained}, **training.payload}
                    for name, training in TRAININGS.items()
                },
            },
            "runs": runs,
        },
    }


if __name__ == "__main__":
    main()
