"""Measure where the time of a training step goes, with this backend and with verl's own agent loop.

    .venv-verl/bin/python benchmarks/training_step.py

All runs are `examples/train_arithmetic`: the same model, questions, seed, trainer and engine, on the CPU.

- ours: the example itself. Each rollout is an agent in a process of a local cloud that invokes 22 sessions per
  second, a little less than AWS's default limit.
- ours, one container: all agents are in one container behind the plain HTTP runtime.
- verl's agent loop: a rollout is a coroutine that calls the engine, and a function scores the reply.

Agents, cloud, engine and trainer share the cores of one machine. On a cluster only the trainer, the gateway and the
collection are on the training side.

The parts are verl's own timings, as medians over the steps after the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollout_backend.local.cloud import LocalStorage
from rollout_backend.local.tiny_model import make_tiny_model
from rollout_backend.serving.install import find_model
from rollout_backend.serving.server_process import ServerProcess, free_port

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "train_arithmetic"
AGENT = EXAMPLE.parent / "arithmetic" / "agent.py"
METRICS = "metrics.jsonl"
PARTS = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
REST = "rest"
KINDS = {  # of the processes of a training, by a part of their command
    "verl.trainer.main_ppo": "trainer's main process",
    "ray::TaskRunner": "trainer's main process",
    "ray::WorkerDict": "trainer's worker",
    "ray::AgentLoopWorker": "verl's agent loop",
    "ray::RewardLoopWorker": "verl's agent loop",
    "rollout_backend.gateway": "gateway",
    "rollout_backend.janitor": "janitor",
    "sglang_router": "router",
    "sglang": "engine",
    "SGLang": "engine",
    "engine-cpu": "engine",
    "ray::TransferQueue": "TransferQueue",
    "ray::SimpleStorage": "TransferQueue",
    "learning_curves.py": "agents and emulated AWS",
}
OTHER = "Ray and other processes"


def run_ours(steps: int, work: Path, model: list[str]) -> None:
    _run([sys.executable, str(EXAMPLE / "train.py"), *model, "--steps", str(steps), "--work", str(work)], work)


def run_ours_in_one_container(steps: int, work: Path, model: list[str]) -> None:
    asyncio.run(_run_with_one_container(_example(steps, work, model)))


async def _run_with_one_container(example: Example) -> None:
    port = free_port()
    async with LocalStorage(run_dir=example.work / "cloud") as storage:
        env = {**os.environ, **storage.environ, "AWS_ENDPOINT_URL": storage.endpoint_url, "HOST": "127.0.0.1"}
        agent = ServerProcess(
            "the agent", [sys.executable, str(AGENT)], example.work / "agent.log", {**env, "PORT": str(port)}
        )
        await agent.start()
        settings = {
            "aws": {"region": storage.region, "endpoint_url": storage.endpoint_url},
            "storage": {"bucket": storage.bucket},
            "runtime": {"kind": "http", "url": f"http://127.0.0.1:{port}", "max_sessions": 1000},
            "output_dir": str(example.work / "runs"),
        }
        path = example.work / "rollout_backend.json"  # JSON is YAML
        path.write_text(json.dumps(settings))
        backend = example.module.backend_overrides(example.tasks, path)
        try:
            await asyncio.to_thread(example.run, backend, storage.environ)
        finally:
            await agent.stop()


def run_verl(steps: int, work: Path, model: list[str]) -> None:
    """Run verl's own agent loop on the questions of the example."""
    example = _example(steps, work, model)
    data = write_questions(example.tasks, work / "questions.parquet")
    example.run(agent_loop_overrides(data), {})


def agent_loop_overrides(questions: Path) -> list[str]:
    """Return what a training script adds to train with verl's own agent loop."""
    return [
        f"data.train_files={questions}",
        f"data.val_files={questions}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE.absolute() / 'arithmetic_reward.py'}",
    ]


@dataclass(frozen=True)
class Example:
    """The example's settings for verl, with its tasks in a file."""

    module: Any
    options: argparse.Namespace
    model: Path
    tasks: Path

    @property
    def work(self) -> Path:
        return Path(self.options.work)

    def run(self, own: list[str], env: Mapping[str, str]) -> None:
        argv = [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *self.module.training_overrides(self.options, self.model),
            *self.module.cpu_overrides(self.options),
            *own,
            f"hydra.run.dir={self.work}",
            "hydra.output_subdir=null",
        ]
        _run(argv, self.work, {**self.module.environment(), **env, "VERL_FILE_LOGGER_PATH": str(self.work / METRICS)})


def example_module() -> Any:
    """Return the example's script, with its settings for verl."""
    sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module("train")


def _example(steps: int, work: Path, model: list[str]) -> Example:
    module = example_module()
    tiny = "--tiny" in model
    options = argparse.Namespace(tiny=tiny, dtype="float32", trainer="v1", steps=steps, work=work)
    folder = make_tiny_model(work / "model") if tiny else find_model()
    return Example(module, options, folder, module.write_tasks(work / "tasks.jsonl", module.PROMPTS * (steps + 1)))


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


class CpuOfSteps:
    """Counts the CPU seconds of this process and its descendants between the steps of a training.

    A context manager. `steps` has the seconds of each step after the first one, by kind of process.
    """

    def __init__(self, metrics: Path) -> None:
        """A step ends with a line in `metrics`."""
        self._metrics = metrics
        self._ends: list[Counter[str]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def steps(self) -> list[dict[str, float]]:
        return [dict(after - before) for before, after in itertools.pairwise(self._ends)]

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            if self._metrics.exists() and self._metrics.read_bytes().count(b"\n") > len(self._ends):
                self._ends.append(self._spent())

    def _spent(self) -> Counter[str]:
        fields = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
        spent: Counter[str] = Counter()
        for pid in fields:
            ancestor = pid
            while ancestor in fields and ancestor != os.getpid():
                ancestor = int(fields[ancestor][1])
            if ancestor == os.getpid():
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    kind = next((kind for part, kind in KINDS.items() if part in command), OTHER)
                    spent[kind] += sum(map(int, fields[pid][11:13])) / os.sysconf("SC_CLK_TCK")
        return spent


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the steps after the first, which also loads and compiles."""
    return {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}


RUNS = {"ours": run_ours, "ours, one container": run_ours_in_one_container, "verl's agent loop": run_verl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--small", action="store_true", help="train SmolLM2-135M instead of a tiny random model")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    model = [] if args.small else ["--tiny"]
    found: dict[str, Any] = {"model": "SmolLM2-135M" if args.small else "tiny", "steps": args.steps - 1}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as work:
            run(args.steps, Path(work), model)
            found[name] = summary(steps_of(Path(work) / METRICS))
        parts = "  ".join(f"{part} {seconds:.2f}" for part, seconds in found[name].items() if seconds >= 0.005)
        print(f"{name:22s} {sum(found[name].values()):6.2f} s a step: {parts}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
