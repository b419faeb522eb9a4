"""Train the same model on the same sums with verl's own agent loop and through this backend.

    .venv-verl/bin/python benchmarks/learning_curves.py --json runs/results/learning.json

- verl: verl's own agent loop. A rollout is a coroutine in verl's process, and a function scores the reply.
- ours: this backend. A rollout is a session of an agent that runs in `RolloutApp`, against S3, SQS and AgentCore by
  their wire protocols.

Both have the same trainer (verl's v1 trainer with GRPO), engine (SGLang) and optimizer, and for each seed the same
initial model and questions. The engine samples without a seed, so two runs of one seed differ, too. The model has two
layers and one token per byte. It is fitted to the sums until it is right about every fifth time (`tiny_learner.py`),
so that a run takes minutes on one core.

With `--parts`, one seed trains for 12 steps, and shows where a step's time goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import sub
from pathlib import Path
from typing import Any

import psutil  # verl needs it, too
from arithmetic_reward import compute_score
from common import arguments, write_section
from learning_report import CALLS, TIMELINE
from tiny_learner import fit_sums
from verl_training import COMPARED, ORDERED, Sums, Training, parts_of, without_first
from wrapped_agents import WrappedAgents, backend_settings

from rollout_backend.results.archive import RunArchive

VERL, OURS = "verl", "ours"
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


async def train(variant: str, training: Training, sums: Sums) -> list[dict[str, Any]]:
    """Train once, and return what verl has logged of each step."""
    if variant == VERL:
        return await training.run([*sums.overrides(), *training.through_verls_loop(), *ORDERED], COMPARED)
    async with WrappedAgents(lambda reply, answer: compute_score("", reply, answer) == 1).serve() as url:
        own = training.through_backend(backend_settings(url, training.work / "runs"))
        return await training.run([*sums.overrides(), *own], COMPARED)


@contextlib.contextmanager
def cpu_of_steps(metrics: Path) -> Iterator[list[dict[str, float]]]:
    """Yield a list with the CPU seconds of each step after the first, by kind of process, when the block has ended.

    A step ends with a line in `metrics`. This process and its descendants count.
    """
    ends: list[Counter[str]] = []
    steps: list[dict[str, float]] = []
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(0.02):
            if metrics.exists() and metrics.read_bytes().count(b"\n") > len(ends):
                ends.append(_spent())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield steps
    finally:
        stopped.set()
        thread.join()
        steps += [dict(after - before) for before, after in itertools.pairwise(ends)]


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
            assert report is not None
            assert report.until_invoke_s is not None
            assert report.closing_s is not None
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


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each value over the steps. A missing one is 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: round(statistics.median(step.get(name, 0.0) for step in steps), 3) for name in names}


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
                with cpu_of_steps(work / "metrics.jsonl") as cpu:
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
                if options.parts:
                    gen_s = [step["gen"] for step in parts]
                    timeline_s = medians(timelines(work / "runs", gen_s)[1:])
                    measured = {"gen_s": round(statistics.median(gen_s[1:]), 3), "timeline_s": timeline_s}
                    runs[-1] |= {**measured, "cpu_s": medians(cpu)}
                print(variant, seed, runs[-1]["right"], flush=True)
                command = f".venv-verl/bin/python benchmarks/learning_curves.py{option}"
                results = {"settings": asdict(sums), "runs": runs}
                write_section(options.json, section, command, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
