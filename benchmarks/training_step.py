"""Measure where the time of a training step goes, with this backend and with verl's own agent loop.

    .venv-verl/bin/python benchmarks/training_step.py

Both runs are `examples/train_arithmetic`: the same model, questions, seed, trainer and engine, on the CPU. With this
backend each rollout is an agent in a process of a local cloud. With verl's own loop it is a coroutine that calls the
engine directly, and a function scores the reply. Agents, cloud, engine and trainer share the cores of one machine;
on a cluster only the trainer, the gateway and the collection are on the training side.

The parts are verl's own timings, as medians over the steps after the first one.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__)
EXAMPLE = HERE.parent.parent / "examples" / "train_arithmetic"
PARTS = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
REST = "rest"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return 1 if the last integer of the reply is the answer. verl loads this function by name."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and int(numbers[-1]) == int(ground_truth))


def run_ours(steps: int, work: Path, model: list[str]) -> list[dict[str, float]]:
    argv = [sys.executable, str(EXAMPLE / "train.py"), *model, "--steps", str(steps), "--work", str(work)]
    _run(argv, work)
    return steps_of(work / "metrics.jsonl")


def run_verl(steps: int, work: Path, model: list[str]) -> list[dict[str, float]]:
    """Run verl's own agent loop on the questions of the example."""
    sys.path.insert(0, str(EXAMPLE))
    import train  # the example

    from rollout_backend.local.verl_cpu.environment import environment
    from rollout_backend.local.verl_cpu.tiny_model import make_tiny_model
    from rollout_backend.serving.install import find_model

    tiny = "--tiny" in model
    options = argparse.Namespace(tiny=tiny, dtype="float32", trainer="v1", steps=steps, work=work)
    folder = make_tiny_model(work / "model") if tiny else find_model()
    tasks = train.write_tasks(work / "tasks.jsonl", train.PROMPTS * (steps + 1))
    data = write_questions(tasks, work / "questions.parquet")
    argv = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *train.training_overrides(options, folder),
        *train.cpu_overrides(options),
        f"data.train_files={data}",
        f"data.val_files={data}",
        "algorithm.adv_estimator=grpo",
        f"{train.ROLLOUT}.calculate_log_probs=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE.absolute()}",
        f"hydra.run.dir={work}",
        "hydra.output_subdir=null",
    ]
    _run(argv, work, {**environment(), "VERL_FILE_LOGGER_PATH": str(work / "metrics.jsonl")})
    return steps_of(work / "metrics.jsonl")


def write_questions(tasks: Path, path: Path) -> Path:
    """Write the example's tasks as verl's own dataset reads them."""
    import pyarrow as pa
    from pyarrow import parquet

    payloads = [json.loads(line)["payload"] for line in tasks.read_text().splitlines()]
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": payload["question"]}],
            "reward_model": {"style": "rule", "ground_truth": payload["answer"]},
            "extra_info": {"index": number},
        }
        for number, payload in enumerate(payloads)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def _run(argv: list[str], work: Path, env: dict[str, str] | None = None) -> None:
    with (work / "output.log").open("w") as output:
        done = subprocess.run(argv, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = (work / "output.log").read_text().splitlines()[-25:]
        raise SystemExit("\n".join([f"{argv[1:3]} ended with {done.returncode}:", *tail]))


def steps_of(metrics: Path) -> list[dict[str, float]]:
    """Return the seconds of each part of each step, from verl's `file` logger."""
    found = []
    for line in metrics.read_text().splitlines():
        data = json.loads(line)["data"]
        parts = {name: float(data.get(f"timing_s/{name}", 0.0)) for name in PARTS}
        found.append({**parts, REST: float(data["timing_s/step"]) - sum(parts.values())})
    return found


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the steps after the first, which also loads and compiles."""
    return {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--small", action="store_true", help="train SmolLM2-135M instead of a tiny random model")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    model = [] if args.small else ["--tiny"]
    found: dict[str, Any] = {"model": "SmolLM2-135M" if args.small else "tiny", "steps": args.steps - 1}
    for name, run in (("ours", run_ours), ("verl's agent loop", run_verl)):
        with tempfile.TemporaryDirectory() as work:
            found[name] = summary(run(args.steps, Path(work), model))
        parts = "  ".join(f"{part} {seconds:.2f}" for part, seconds in found[name].items() if seconds >= 0.005)
        print(f"{name:20s} {sum(found[name].values()):6.2f} s a step: {parts}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
