"""Train the same model on the same sums with verl's own agent loop and through this backend.

    .venv-verl/bin/python benchmarks/learning_curves.py --json runs/results/learning.json

With verl's own loop a rollout is a coroutine in verl's process, and a function scores the reply. Ours is a session of
an agent that runs in `RolloutApp`, against S3, SQS and AgentCore by their wire protocols. The engine samples without
a seed, so two runs of one seed differ, too.

With `--parts`, one seed trains for 12 steps, and shows where a step's time goes.
"""

import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import sub
from pathlib import Path
from typing import Any

import psutil  # verl needs it, too
from arithmetic_reward import compute_score
from common import arguments, write_section
from learning_report import CALLS, TIMELINE
from tiny_learner import fit_sums
from verl_training import Sums, Training, averages, parts_of
from wrapped_agents import WrappedAgents

from rollout_backend.run.accounts.archive import RunArchive

VERL, OURS = "verl", "ours"
KINDS = {  # of the processes of a training, by a part of their command
    "verl.trainer.main_ppo": "trainer's main process",
    "ray::TaskRunner": "trainer's main process",
    "ray::WorkerDict": "trainer's worker",
    "ray::AgentLoopWorker": "verl's agent loop",
    "ray::RewardLoopWorker": "verl's agent loop",
    "rollout_backend.model.gateway": "gateway",
    "rollout_backend.run.janitor": "janitor",
    "sglang_router": "router",
    "sglang": "engine",
    "SGLang": "engine",
    "engine-cpu": "engine",
    "ray::TransferQueue": "TransferQueue",
    "ray::SimpleStorage": "TransferQueue",
    "learning_curves.py": "agents and emulated AWS",
}
OTHER = "Ray and other processes"


async def measure(
    variant: str, training: Training, sums: Sums
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Train once. Return what verl has logged, and the CPU seconds of each step after the first by kind of process.

    A step ends with a line in verl's log. This process and its descendants count.
    """
    ends = list[Counter[str]]()

    async def watch() -> None:
        while True:
            if len(training.logged()) > len(ends):
                ends.append(_spent())
            await asyncio.sleep(0.02)

    agents = WrappedAgents(lambda reply, answer: compute_score("", reply, answer) == 1) if variant == OURS else None
    watching = asyncio.create_task(watch())
    logged = await sums.train(training, agents)
    watching.cancel()
    return logged, [dict(after - before) for before, after in itertools.pairwise(ends)]


def _spent() -> Counter[str]:
    this, spent = psutil.Process(), Counter[str]()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            spent[next((kind for part, kind in KINDS.items() if part in command), OTHER)] += times.user + times.system
    return spent


def timelines(runs: Path, gen_s: Sequence[float]) -> list[dict[str, float]]:
    """Split the generation of each step at what this backend has recorded of it; empty for verl's own agent loop."""
    found = []
    for folder in runs.glob("*/steps"):
        archive = RunArchive(folder.parent)
        for number, whole_s in zip(archive.steps(), gen_s, strict=True):
            report, records = archive.read_report(number), archive.read_records(number)
            results = [archive.read_result(record) for record in records]
            settled = max(record.settled_at or 0.0 for record in records)
            began = settled + report.closing_s - report.seconds
            marks = [
                report.until_invoke_s,
                min(result.started_at for result in results) - began,
                max(result.finished_at for result in results) - began,
                settled - began,
                report.seconds,
                whole_s,
            ]
            calls = {name: statistics.median(getattr(record.result, name) for record in records) for name in CALLS}
            found.append(dict(zip(TIMELINE, map(sub, marks, [0.0, *marks]), strict=True)) | calls)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", action="store_true", help="one seed and 12 steps, to see where their time goes")
    options = parser.parse_args()
    section, option, steps = ("parts", " --parts", 12) if options.parts else ("learning", "", Sums.steps)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    sums, runs, began = Sums(steps=2 if options.smoke else steps), [], time.monotonic()
    for seed in range(1 if options.smoke or options.parts else 5):
        with tempfile.TemporaryDirectory() as folder:
            fit_sums(Path(folder) / "model", seed, sums.right_at_start)
            for variant in (VERL, OURS):
                work = Path(folder) / variant
                work.mkdir()
                training = Training(work, Path(folder) / "model", sums.steps)
                sums.write_tasks(training.tasks, seed)
                logged, cpu = asyncio.run(measure(variant, training, sums))
                parts = parts_of(logged)
                runs.append(
                    {
                        "variant": variant,
                        "seed": seed,
                        "right": [round(step["critic/score/mean"], 4) for step in logged],
                        "step_s": [round(sum(step.values()), 4) for step in parts],
                        "parts_s": averages(statistics.fmean, parts[1:]),  # the first step also loads and compiles
                    }
                )
                if options.parts:
                    gen_s = [step["gen"] for step in parts]
                    runs[-1]["gen_s"] = round(statistics.median(gen_s[1:]), 3)
                    runs[-1]["timeline_s"] = averages(statistics.median, timelines(work / "runs", gen_s)[1:])
                    runs[-1]["cpu_s"] = averages(statistics.median, cpu)
                print(variant, seed, runs[-1]["right"], flush=True)
                command = f".venv-verl/bin/python benchmarks/learning_curves.py{option}"
                results = {"settings": asdict(sums), "runs": runs}
                write_section(options.json, section, command, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
