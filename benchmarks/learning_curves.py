"""Train the same model on the same sums with verl's own agent loop and through this backend.

    .venv-verl/bin/python benchmarks/learning_curves.py --json runs/results/learning.json

- verl: verl's own agent loop. A rollout is a coroutine in verl's process, and a function scores the reply.
- ours: this backend. A rollout is a session of an agent that runs in `RolloutApp`, against S3, SQS and AgentCore by
  their wire protocols.

Both have the same trainer (verl's v1 trainer with GRPO), engine (SGLang) and optimizer, and for each seed the same
initial model and questions. The engine samples without a seed, so two runs of one seed differ, too. The model has two
layers and one token per byte. It is fitted to the sums until it is right about every fifth time (`tiny_learner.py`),
so that a run takes minutes on one core.

Each run is kept in a file of `--runs` and is not repeated: after an interruption, start the script again.

With `--parts`, one seed trains for 12 steps, and shows where a step's time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import sub
from pathlib import Path
from typing import Any

from arithmetic_reward import compute_score
from emulated_aws.agentcore import ARN
from emulated_aws.cloud import Cloud
from emulated_aws.sqs import REGION
from emulated_aws.wrapped_agents import SessionRecord, WrappedAgents
from learning_report import CALLS, TIMELINE, VERL
from learning_report import PATH as VARIANTS
from run_all import write_section
from tiny_learner import fit_sums, question
from training_step import (
    METRICS,
    CpuOfSteps,
    Example,
    agent_loop_overrides,
    example_module,
    steps_of,
    write_questions,
)

from rollout_backend.results.archive import RunArchive
from rollout_backend.results.step_report import StepReport

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "results" / "learning"
# Ray would run its workers at a lower priority than the agents. One thread each, so that runs can be compared.
TRAINER = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}


ORDERED = (
    "trainer.v1.sampler.custom_sampler.path=pkg://identity_recorder",
    "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
)


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    steps: int = 30
    prompts: int = 16
    group: int = 4
    learning_rate: float = 3e-4
    entropy: float = 0.0
    right_at_start: float = 0.2


def write_tasks(path: Path, settings: Settings, seed: int) -> Path:
    """Write the questions of all steps. The same seed gives the same questions."""
    draw = random.Random(seed)
    lines = []
    for _ in range(settings.prompts * (settings.steps + 1)):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        lines.append(json.dumps({"payload": {"question": question(a, b), "answer": str(a + b)}}) + "\n")
    path.write_text("".join(lines))
    return path


# --- one run ---------------------------------------------------------------------------------------------------


async def run(variant: str, seed: int, settings: Settings, model: Path, work: Path) -> dict[str, Any]:
    """Train the model once in `work`, and return what is kept of it. Raises SystemExit with the end of verl's log."""
    began = time.monotonic()
    options = Namespace(tiny=True, dtype="float32", trainer="v1", steps=settings.steps, work=work)
    example = Example(example_module(), options, model, write_tasks(work / "tasks.jsonl", settings, seed))
    with CpuOfSteps(work / METRICS) as cpu:
        found = await (run_verl(example, settings) if variant == VERL else run_ours(seed, example, settings))
    logged = [json.loads(line)["data"] for line in (work / METRICS).read_text().splitlines()]
    parts = steps_of(work / METRICS)
    return {
        "variant": variant,
        "seed": seed,
        "right": _rounded(step["critic/score/mean"] for step in logged),
        "step_s": _rounded(sum(step.values()) for step in parts),
        "parts_s": {name: round(statistics.fmean(step[name] for step in parts[1:]), 3) for name in parts[0]},
        "gen_s": round(statistics.median(step["gen"] for step in parts[1:]), 3),
        "cpu_s": medians(cpu.steps),
        "timeline_s": medians(timelines(work / "runs", [step["gen"] for step in parts])[1:]),
        **found,
        "seconds": round(time.monotonic() - began),
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each value over the steps. A missing one is 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: round(statistics.median(step.get(name, 0.0) for step in steps), 3) for name in names}


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


def common_overrides(settings: Settings) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_batch_size={settings.prompts}",
        "data.max_response_length=8",
        f"{rollout}.n={settings.group}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={settings.prompts * settings.group}",
        f"{actor}.ppo_mini_batch_size={settings.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={settings.prompts * settings.group}",
        f"{actor}.entropy_coeff={settings.entropy}",
        f"{actor}.optim.lr={settings.learning_rate}",
    ]


async def run_verl(example: Example, settings: Settings) -> dict[str, Any]:
    own = [
        *agent_loop_overrides(write_questions(example.tasks, example.work / "questions.parquet")),
        *ORDERED,
    ]
    path = {"PYTHONPATH": os.pathsep.join([str(HERE.absolute()), example.module.environment()["PYTHONPATH"]])}
    await asyncio.to_thread(example.run, [*common_overrides(settings), *own], TRAINER | path)
    return {}


def is_right(reply: str, answer: str) -> bool:
    return compute_score("", reply, answer) == 1


async def run_ours(seed: int, example: Example, settings: Settings) -> dict[str, Any]:
    agents = WrappedAgents(is_right, seed)
    async with Cloud(agents).serve() as url, agents:
        os.environ["AWS_ENDPOINT_URL"] = url  # of the agents, which run in this process
        path = example.work / "rollout_backend.json"  # JSON is YAML
        path.write_text(json.dumps(backend_settings(url, example.work / "runs")))
        own = [*common_overrides(settings), *example.module.backend_overrides(example.tasks, path)]
        await asyncio.to_thread(example.run, own, TRAINER)
    return accounts(agents.records, example.work / "runs")


def backend_settings(url: str, output: Path) -> dict[str, Any]:
    return {
        "aws": {"region": REGION, "endpoint_url": url},
        "storage": {"bucket": "results"},
        "runtime": {"kind": "agentcore", "arn": ARN, "endpoint_url": url, "invoke_per_s": 200, "max_attempts": 50},
        # No stragglers, and limits that only end hangs, so that a slow machine loses no rollout.
        "timeouts": {
            "model_call_s": 600, "agent_s": 900, "publish_grace_s": 60, "collection_s": 1800, "session_key_s": 2400,
            "heartbeat_s": 2,
        },
        "circuit_breaker": {"max_failures": None},
        "output_dir": str(output),
    }  # fmt: skip


def engine_settings(run_id: str, model: Path, url: str, output: Path) -> dict[str, Any]:
    """Return the settings of a run without verl, and point this process's agents to the emulated AWS."""
    os.environ["AWS_ENDPOINT_URL"] = url
    return {
        **backend_settings(url, output),
        "run_id": run_id,
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 1.0},
    }


def accounts(records: Iterable[SessionRecord], output: Path) -> dict[str, Any]:
    """Return how many sessions were lost, and what became of the rollouts by the reports in `output`."""
    sums: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    reports = [StepReport.model_validate_json(file.read_text()) for file in output.glob("*/steps/*.json")]
    for report in reports:
        sums.update({"planned": report.planned, "trainable": report.trainable, "attempts": report.attempts})
        reasons.update(report.reasons)
    return {
        "sessions": len(list(records)),
        "lost": Counter(record.lost for record in records if record.lost),
        **sums,
        "reasons": reasons,
        "unbalanced_steps": sum(not report.balanced for report in reports),
    }


# --- all runs --------------------------------------------------------------------------------------------------


def run_or_read(variant: str, seed: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """Return a run with these settings: the one that is kept in the folder, or a new one."""
    name = f"{VARIANTS.index(variant)}-{seed}"
    kept, work = folder / f"{name}.json", folder / f"{name}.work"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        if found.pop("settings") == asdict(settings):
            return found
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = warm_model(folder, seed, settings).absolute()
    found = asyncio.run(run(variant, seed, settings, model, work.absolute()))
    kept.write_text(json.dumps({**found, "settings": asdict(settings)}) + "\n")
    shutil.rmtree(work)
    return found


def warm_model(folder: Path, seed: int, settings: Settings) -> Path:
    """Return the initial model of a seed, which is made once."""
    model = folder / f"model-{seed}-{settings.right_at_start:g}"
    if not model.exists():
        unfinished = folder / "model.work"
        shutil.rmtree(unfinished, ignore_errors=True)
        fit_sums(unfinished, seed, settings.right_at_start)
        unfinished.rename(model)
    return model


def line(found: dict[str, Any]) -> str:
    curve = " ".join(f"{value:.2f}" for value in found["right"])
    lost = f"; {found['reasons']}" if "reasons" in found else ""
    step_s = statistics.fmean(found["step_s"][1:])
    return f"{found['variant']:12s} seed {found['seed']}: {curve}; {step_s:.2f} s a step, {found['seconds']} s{lost}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--runs", type=Path, help="folder of the finished runs")
    parser.add_argument("--smoke", action="store_true", help="one seed and two steps, to see that all variants run")
    parser.add_argument("--parts", action="store_true", help="one seed and 12 steps, to see where their time goes")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    settings = Settings(steps=2 if options.smoke else 12 if options.parts else options.steps)
    os.environ.update(KEYS)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    folder = options.runs or (RUNS.with_name("parts") if options.parts else RUNS)
    runs = []
    for seed in options.seeds[:1] if options.smoke or options.parts else options.seeds:
        for variant in options.variants:
            runs.append(run_or_read(variant, seed, settings, folder))
            print(line(runs[-1]), flush=True)
            if options.json is not None:
                name, option = ("parts", " --parts") if options.parts else ("learning", "")
                command = f".venv-verl/bin/python benchmarks/learning_curves.py{option}"
                results = {"settings": asdict(settings), "runs": runs}
                write_section(options.json, name, command, sum(run["seconds"] for run in runs), results)


if __name__ == "__main__":
    main()
