"""Train the same model with verl's own agent loop and through the whole backend, and compare the runs bit for bit.

    .venv-verl/bin/python benchmarks/identity.py --json runs/results/identity.json

Each reply has its own seed, of its step, task, rollout and turn (`engine.protocol.reply_seed`). SGLang runs one
request at a time with --enable-deterministic-inference, so a reply depends on its prompt, its seed and the weights
alone. All of verl's processes have one thread.

- verl: verl's own agent loop, with the same seeds, and rows in the order of the questions (`identity_recorder.py`).
- ours: sessions of an agent in `RolloutApp`, against S3, SQS and AgentCore by their wire protocols (as in
  `learning_curves.py`), gateway, buffer and rows.
- ours, killed: the same, while a fifth of the rollouts lose their first session after it has sampled.

The reward function gets the same text: verl removes special tokens that were sampled inside of a reply, and the
gateway shows their names to the agent, so the agent removes them.

Compared are all columns of each step's batch, row by row, and the weights at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arithmetic_reward import compute_score
from emulated_aws.cloud import Cloud
from emulated_aws.wrapped_agents import WrappedAgents
from learning_curves import (
    KEYS,
    ORDERED,
    TRAINER,
    Settings,
    accounts,
    backend_settings,
    common_overrides,
    warm_model,
    write_tasks,
)
from run_all import write_section
from training_step import Example, agent_loop_overrides, example_module, write_questions

from agent_wrapper import RolloutContext

HERE = Path(__file__).parent.absolute()
VERL, OURS, KILLED = "verl", "ours", "ours, killed"
TRAINERS = ("v1", "legacy")
SEED = 1


def train(variant: str, trainer: str, steps: int, model: Path, work: Path) -> dict[str, Any]:
    """Train once in `work`, which then holds `records` and `weights`. Return what is kept of the run."""
    (work / "records").mkdir(parents=True)
    options = Namespace(tiny=True, dtype="float32", trainer=trainer, steps=steps, work=work)
    settings = Settings(steps=steps)
    example = Example(example_module(), options, model, write_tasks(work / "tasks.jsonl", settings, SEED))
    began = time.monotonic()
    found = asyncio.run(_run(variant, example, settings))
    (weights,) = work.glob("checkpoints/*/actor/huggingface/*.safetensors")
    weights.rename(work / "weights.safetensors")
    return {"variant": variant, "trainer": trainer, "seconds": round(time.monotonic() - began), **found}


async def _run(variant: str, example: Example, settings: Settings) -> dict[str, Any]:
    rollout = "actor_rollout_ref.rollout"
    env = {
        **TRAINER,
        "RECORDS": str(example.work / "records"),
        "PYTHONPATH": os.pathsep.join([str(HERE), example.module.environment()["PYTHONPATH"]]),
    }
    common = [
        *common_overrides(settings),
        f"{rollout}.full_determinism=True",
        f"{rollout}.seed={SEED}",
        f"trainer.save_freq={settings.steps}",
        f"trainer.default_local_dir={example.work / 'checkpoints'}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    ]
    recorded = ["data.custom_cls.path=pkg://identity_recorder", "algorithm.adv_estimator=grpo"]
    if variant == VERL:
        loops = example.work / "agent_loops.json"  # JSON is YAML
        loops.write_text(json.dumps([{"name": "seeded", "_target_": "identity_recorder.SeededAgentLoop"}]))
        own = [
            *agent_loop_overrides(write_questions(example.tasks, example.work / "questions.parquet")),
            "data.custom_cls.name=RLHFDataset",
            f"{rollout}.agent.agent_loop_config_path={loops}",
            f"{rollout}.agent.default_agent_loop=seeded",
            *ORDERED,
        ]
        await asyncio.to_thread(example.run, [*common, *own, *recorded], env)
        return {}
    agents = _KilledAgents(_is_right, SEED, 0.2) if variant == KILLED else WrappedAgents(_is_right, SEED)
    async with Cloud(agents).serve() as url, agents:
        os.environ["AWS_ENDPOINT_URL"] = url  # of the agents, which run in this process
        path = example.work / "rollout_backend.json"
        path.write_text(json.dumps(backend_settings(url, example.work / "runs")))
        own = example.module.backend_overrides(example.tasks, path)
        await asyncio.to_thread(example.run, [*common, *own, *recorded], env)
    return accounts(agents.records, example.work / "runs")


class _KilledAgents(WrappedAgents):
    """Agents that take a while. A session's silence is noticed only if it was heard before, and while others are."""

    async def _agent(self, context: RolloutContext) -> dict[str, Any]:
        found = await super()._agent(context)
        await asyncio.sleep(15)
        return found

    def _kill(self, rollout_id: str) -> None:
        self._loop.call_later(4, super()._kill, rollout_id)


def _is_right(reply: str, answer: str) -> bool:
    """Score a reply like verl, which first removes special tokens. Our agents see their names as text."""
    return compute_score("", re.sub(r"<\|\w+\|>", "", reply), answer) == 1


def compare(model: Path, reference: Path, other: Path, steps: int) -> dict[str, Any]:
    """Compare two runs. Return the rows and tokens compared, and for each column and step where they differ."""
    import torch
    from safetensors.torch import load_file

    rows = tokens = 0
    differences = []
    for step in range(1, steps + 1):
        first, second = _loaded(step, reference), _loaded(step, other)
        rows += len(first["responses"])
        tokens += sum(int(mask.sum()) for mask in first["response_mask"])
        differences += [{"step": step, **found} for found in _differing(first, second)]
    first, second = (load_file(folder / "weights.safetensors") for folder in (reference, other))
    begun = load_file(model / "model.safetensors")
    changed = sum(int((first[name] != begun[name]).sum()) for name in first)
    differing = [
        {
            "name": name,
            "elements": int((first[name] != second[name]).sum()),
            "largest": float((first[name] - second[name]).abs().max()),
        }
        for name in first
        if not torch.equal(first[name], second[name])
    ]
    return {
        "steps": steps,
        "rows": rows,
        "tokens": tokens,
        "weights": sum(tensor.numel() for tensor in first.values()),
        "weights_trained": changed,
        "differences": differences,
        "differing_weights": differing,
    }


def _loaded(step: int, run: Path) -> dict[str, list[Any]]:
    import torch

    rows: dict[str, list[Any]] = torch.load(run / "records" / f"{step}.pt", weights_only=True)  # noqa: TID251
    return rows


def _differing(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    import torch

    for name in first:
        pairs = list(zip(first[name], second[name], strict=True))
        unequal = [i for i, (a, b) in enumerate(pairs) if a.dtype != b.dtype or not torch.equal(a, b)]
        if unequal:
            a, b = pairs[unequal[0]]
            largest = float((a - b).abs().max()) if a.shape == b.shape else None
            yield {"column": name, "rows": len(unequal), "first_row": unequal[0], "largest": largest}


def measure(trainer: str, variants: list[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train with verl's own loop and in each variant, and return a comparison for each."""
    found = []
    folder.mkdir(parents=True, exist_ok=True)
    model = warm_model(folder, SEED, Settings()).absolute()
    for variant in (VERL, *variants):
        work = (folder / f"{trainer}-{variant.replace(', ', '-')}").absolute()
        shutil.rmtree(work, ignore_errors=True)
        run = train(variant, trainer, steps, model, work)
        if variant == VERL:
            reference, seconds = work, run["seconds"]
        else:
            found.append({**run, "seconds_verl": seconds, **compare(model, reference, work, steps)})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--variants", nargs="*", choices=(OURS, KILLED), default=[OURS, KILLED])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "results" / "identity")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    os.environ.update(KEYS)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    found: list[dict[str, Any]] = []
    for trainer in options.trainers:
        found += measure(trainer, options.variants, options.steps, options.runs)
        if options.json is not None:
            chosen = ["--trainers", *options.trainers, "--variants", *options.variants]
            command = f".venv-verl/bin/python benchmarks/identity.py {shlex.join(chosen)}"
            of_verl = {each["trainer"]: each["seconds_verl"] for each in found}
            seconds = sum(of_verl.values()) + sum(each["seconds"] for each in found)
            results = {"settings": asdict(Settings(steps=options.steps)), "comparisons": found}
            write_section(options.json, "identity", command, seconds, results)


if __name__ == "__main__":
    main()
