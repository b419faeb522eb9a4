"""Measure where the time of a training step goes, with this backend and with verl's own agent loop.

    .venv-verl/bin/python benchmarks/training_step.py

All runs are `examples/train_arithmetic`: the same model, questions, seed, trainer and engine, on the CPU. The local
cloud invokes 22 sessions per second, a little less than AWS's default limit. The parts are verl's own timings, as
medians over the steps after the first one.
"""

import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, compare
from verl_training import Training, averages, example, parts_of

from rollout_backend.model.serving.server_process import ServerProcess, free_port
from rollout_backend.workbench.local.cloud import LocalCloud, LocalStorage
from rollout_backend.workbench.local.tiny_model import make_tiny_model

Logged = list[dict[str, Any]]


async def ours(training: Training) -> Logged:
    async with LocalCloud(example.AGENT, run_dir=training.work / "cloud") as cloud:
        settings = {**cloud.settings(), "output_dir": str(training.work / "runs")}
        return await training.run(training.through_backend(settings), cloud.environ)


async def ours_in_one_container(training: Training) -> Logged:
    port, work = free_port(), training.work
    async with LocalStorage(run_dir=work / "cloud") as storage:
        env = {**os.environ, **storage.environ, "AWS_ENDPOINT_URL": storage.endpoint_url, "HOST": "127.0.0.1"}
        argv = [sys.executable, str(example.AGENT)]
        agent = ServerProcess("the agent", argv, work / "agent.log", {**env, "PORT": str(port)})
        await agent.start()
        settings = {
            **storage.settings(),
            "runtime": {"kind": "http", "url": f"http://127.0.0.1:{port}", "max_sessions": 1000},
            "output_dir": str(work / "runs"),
        }
        try:
            return await training.run(training.through_backend(settings), storage.environ)
        finally:
            await agent.stop()


RUNS = {
    "ours": ours,
    "ours, one container": ours_in_one_container,
    "verl's agent loop": lambda training: training.run(training.through_verls_loop(), {}),
}


def main() -> None:
    options = arguments(__doc__).parse_args()

    def one(name: str, _: object) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            training = Training(Path(folder), make_tiny_model(Path(folder) / "model"), 2 if options.smoke else 3)
            example.write_tasks(training.tasks, example.PROMPTS * (training.steps + 1))
            steps = parts_of(asyncio.run(RUNS[name](training)))
        parts = averages(statistics.median, steps[1:])  # the first one also loads and compiles
        return {**parts, "total": sum(parts.values())}

    compare(options.json, RUNS, one)


if __name__ == "__main__":
    main()
