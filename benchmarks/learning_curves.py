"""Train the same model on the same sums with verl's own agent loop and through this backend.

    .venv-verl/bin/python benchmarks/learning_curves.py --json runs/results/learning.json

- verl: verl's own agent loop. A rollout is a coroutine in verl's process, and a function scores the reply.
- ours: this backend. A rollout is a session of an agent that runs in `RolloutApp`, against S3, SQS and AgentCore by
  their wire protocols.

Both have the same trainer (verl's v1 trainer with GRPO), engine (SGLang) and optimizer, and for each seed the same
initial model and questions. The engine samples without a seed, so two runs of one seed differ, too. The model has two
layers and one token per byte. It is fitted to the sums until it is right about every fifth time (`tiny_learner.py`),
so that a run takes minutes on one core.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arithmetic_reward import compute_score
from common import arguments, write_section
from tiny_learner import fit_sums
from verl_training import COMPARED, ORDERED, Sums, Training, parts_of, without_first
from wrapped_agents import WrappedAgents, backend_settings

VERL, OURS = "verl", "ours"


async def train(variant: str, training: Training, sums: Sums) -> list[dict[str, Any]]:
    """Train once, and return what verl has logged of each step."""
    if variant == VERL:
        return await training.run([*sums.overrides(), *training.through_verls_loop(), *ORDERED], COMPARED)
    async with WrappedAgents(lambda reply, answer: compute_score("", reply, answer) == 1).serve() as url:
        own = training.through_backend(backend_settings(url, training.work / "runs"))
        return await training.run([*sums.overrides(), *own], COMPARED)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    sums, runs, began = Sums(steps=2 if options.smoke else Sums.steps), [], time.monotonic()
    for seed in options.seeds[:1] if options.smoke else options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            fit_sums(Path(folder) / "model", seed, sums.right_at_start)
            for variant in (VERL, OURS):
                work = Path(folder) / variant
                work.mkdir()
                training = Training(work, Path(folder) / "model", sums.steps)
                sums.write_tasks(training.tasks, seed)
                logged = asyncio.run(train(variant, training, sums))
                parts = parts_of(logged)
                runs.append(
                    {
                        "variant": variant,
                        "seed": seed,
                        "right": [round(step["critic/score/mean"], 4) for step in logged],
                        "step_s": [round(sum(step.values()), 4) for step in parts],
                        "parts_s": without_first(statistics.fmean, parts),
                    }
                )
                print(variant, seed, runs[-1]["right"], flush=True)
                command = ".venv-verl/bin/python benchmarks/learning_curves.py"
                results = {"settings": asdict(sums), "runs": runs}
                write_section(options.json, "learning", command, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
