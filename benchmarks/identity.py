"""Train the same model with verl's own agent loop and through the whole backend, and compare the runs bit for bit.

    .venv-verl/bin/python benchmarks/identity.py --json runs/results/identity.json

Each reply has its own seed, of its step, task, rollout and turn (`engine.protocol.reply_seed`). SGLang runs one
request at a time with --enable-deterministic-inference, so a reply depends on its prompt, its seed and the weights
alone. All of verl's processes have one thread. verl's own loop has the same seeds, and rows in the order of the
questions (`identity_recorder.py`); ours are sessions as in `learning_curves.py`.

The reward function gets the same text: verl removes special tokens that were sampled inside of a reply, and the
gateway shows their names to the agent, so the agent removes them.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arithmetic_reward import compute_score
from common import ROOT, arguments, write_section
from tiny_learner import fit_sums
from verl_training import Sums, Training
from wrapped_agents import WrappedAgents

from rollout_backend.run.accounts.step_report import StepReport

VERL, OURS, KILLED = "verl", "ours", "ours, killed"
TRAINERS = ("v1", "legacy")
SEED = 1


async def train(variant: str, training: Training, sums: Sums) -> dict[str, Any]:
    """Train once. Return what became of the sessions and rollouts, unless it is verl's own loop."""
    work, rollout = training.work, "actor_rollout_ref.rollout"
    more = [
        f"{rollout}.full_determinism=True",
        f"{rollout}.seed={SEED}",
        f"trainer.save_freq={sums.steps}",
        f"trainer.default_local_dir={work / 'checkpoints'}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        "data.custom_cls.path=pkg://identity_recorder",
        "algorithm.adv_estimator=grpo",
    ]
    if variant == VERL:
        loops = work / "agent_loops.json"  # JSON is YAML
        loops.write_text(json.dumps([{"name": "seeded", "_target_": "identity_recorder.SeededAgentLoop"}]))
        more += [
            "data.custom_cls.name=RLHFDataset",
            f"{rollout}.agent.agent_loop_config_path={loops}",
            f"{rollout}.agent.default_agent_loop=seeded",
        ]
        agents = None
    else:
        agents = WrappedAgents(_is_right, SEED, killed=0.2 if variant == KILLED else 0.0)
    await sums.train(training, agents, more, RECORDS=str(work / "records"))
    if agents is None:
        return {}
    reports = [StepReport.model_validate_json(file.read_text()) for file in work.glob("runs/*/steps/*.json")]
    return {
        "sessions": len(agents.records),
        "killed": sum(record.lost for record in agents.records),
        **{name: sum(getattr(each, name) for each in reports) for name in ("planned", "trainable", "attempts")},
    }


def _is_right(reply: str, answer: str) -> bool:
    """Score a reply like verl, which first removes special tokens. Our agents see their names as text."""
    return compute_score("", re.sub(r"<\|\w+\|>", "", reply), answer) == 1


def compare(model: Path, reference: Path, other: Path, steps: int) -> dict[str, Any]:
    """Compare two runs. Return the rows and tokens compared, and for each column and step where they differ."""
    import torch
    from safetensors.torch import load_file

    def read(step: int, run: Path) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = torch.load(run / "records" / f"{step}.pt", weights_only=True)  # noqa: TID251
        return rows

    rows = tokens = 0
    differences = []
    for step in range(1, steps + 1):
        first, second = read(step, reference), read(step, other)
        rows += len(first["responses"])
        tokens += sum(int(mask.sum()) for mask in first["response_mask"])
        for name in first:
            pairs = zip(first[name], second[name], strict=True)
            unequal = sum(a.dtype != b.dtype or not torch.equal(a, b) for a, b in pairs)
            if unequal:
                differences.append({"step": step, "column": name, "rows": unequal})
    first, second = (load_file(folder / "weights.safetensors") for folder in (reference, other))
    begun = load_file(model / "model.safetensors")
    changed = sum(int((first[name] != begun[name]).sum()) for name in first)
    return {
        "steps": steps,
        "rows": rows,
        "tokens": tokens,
        "weights": sum(tensor.numel() for tensor in first.values()),
        "weights_trained": changed,
        "differences": differences,
        "differing_weights": sum(int((first[name] != second[name]).sum()) for name in first),
    }


def measure(trainer: str, variants: Sequence[str], sums: Sums, folder: Path) -> list[dict[str, Any]]:
    """Train with verl's own loop and in each variant, and return a comparison for each."""
    found: list[dict[str, Any]] = []
    model = folder / "model"
    fit_sums(model, SEED, sums.right_at_start)
    for variant in (VERL, *variants):
        work = folder / variant.replace(", ", "-")
        (work / "records").mkdir(parents=True)
        training = Training(work, model, sums.steps, trainer)
        sums.write_tasks(training.tasks, SEED)
        run = asyncio.run(train(variant, training, sums))
        (weights,) = work.glob("checkpoints/*/actor/huggingface/*.safetensors")
        weights.rename(work / "weights.safetensors")
        if variant != VERL:
            compared = compare(model, folder / VERL, work, sums.steps)
            found.append({"variant": variant, "trainer": trainer, **run, **compared})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--variants", nargs="*", choices=(OURS, KILLED), default=[OURS, KILLED])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "results" / "identity")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    sums, began = Sums(steps=2 if options.smoke else options.steps), time.monotonic()
    found: list[dict[str, Any]] = []
    for trainer in options.trainers:
        folder = (options.runs / trainer).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        found += measure(trainer, options.variants, sums, folder)
        chosen = ["--trainers", *options.trainers, "--variants", *options.variants]
        command = f".venv-verl/bin/python benchmarks/identity.py {shlex.join(chosen)}"
        results = {"settings": asdict(sums), "comparisons": found}
        write_section(options.json, "identity", command, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
