"""Kill a trainer at random times, restart it each time, and count rollouts lost, run twice, or left open.

    python benchmarks/kill_trainer.py --steps 50 --kills 100
    python benchmarks/kill_trainer.py --steps 50 --kills 50 --asynchronous

Everything except the model is real. The model answers by rule, so the same task gives the same tokens, and the rows
of the disturbed run can be compared with those of an undisturbed one. With `--asynchronous` the trainer requests
batches ahead, as verl's `separate_async` does, and answers take 0.1 s, some of them up to 20 times as long.
"""

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from common import append, lines_of

from agent_wrapper.contract import parse_result_key, step_prefix
from rollout_backend.config import load_config
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.workbench.local.session_pool import EmulatorLimits

RUN = "killed"
READY = "the trainer is ready"
_STEP_S = 1.5  # approximate duration of a step
ROOT = Path(__file__).parent.parent
AGENT = ROOT / "examples" / "arithmetic" / "agent.py"


def answer(prompt: str) -> str:
    """Answer by the prompt alone, so that sampling again gives the same tokens."""
    return f"The answer is {hashlib.sha256(prompt.encode()).digest()[0] % 20}."


def tasks_of(step: int, count: int) -> list[Task]:
    draw = random.Random(step)
    digits = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]
    # The ids differ in each process, because a restarted trainer gives its prompts new ids.
    return [
        Task(
            f"s{step}-{os.getpid()}-{i}",
            {"question": f"Step {step}: what is {a} + {b}?", "answer": str(a + b), "nth": i},
        )
        for i, (a, b) in enumerate(digits)
    ]


def rows_of(rollouts: Any) -> list[str]:
    """Return the trainable tokens, masks and rewards without ids, so that two runs can be compared."""
    return sorted(
        json.dumps([r.reward, [[list(s.token_ids), list(s.response_mask)] for s in r.segments]])
        for r in rollouts
        if r.trainable
    )


def write_settings(work: Path, serving: dict[str, Any], cloud: LocalCloud, **more: Any) -> Path:
    """Write the trainer's settings to a file in this folder, and return its path."""
    base: dict[str, Any] = {
        "run_id": RUN,
        "model": {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 4096},
        "serving": serving,
        "group": {"size": 2},
        # Long enough for ten kills in one step, each of which costs a restart. A rollout that timed out would be
        # accounted for, but the rows could not be compared.
        "timeouts": {
            "model_call_s": 30, "agent_s": 600, "publish_grace_s": 20, "collection_s": 900, "session_key_s": 1200,
        },
        "output_dir": str(work / "runs"),
    }  # fmt: skip
    file = work / "settings.yaml"
    file.write_text(yaml.safe_dump({**base, **more, **cloud.settings()}))
    return file


async def train_asynchronously(settings: Path, checkpoint: Path, steps: int, tasks: int, save_every: int) -> None:
    """Run an asynchronous trainer until all steps are done. It may be killed at any time."""
    sys.path.insert(0, str(ROOT))
    from tests.simulation.async_trainer import AsyncTrainer

    async with RolloutManager(load_config(settings)) as manager:
        print(READY, flush=True)
        trainer = AsyncTrainer(manager, checkpoint, tasks, save_every, lambda index: tasks_of(index, 1)[0], rows_of)
        await trainer.train(steps)


def answers(version: Path, engine: ScriptedEngine) -> Callable[[str], str]:
    """Return a script whose answers take long for some prompts, and have the version in this file."""

    def reply(prompt: str) -> str:
        time.sleep(min(2.0, 0.1 * random.Random(prompt).paretovariate(1.0)))
        engine.weight_version = version.read_text() if version.exists() else "0"
        return answer(prompt)

    return reply


async def train(settings: Path, checkpoint: Path, steps: int, tasks: int) -> None:
    """Run the trainer until all steps are done: a step, then a checkpoint. It may be killed at any time."""
    async with RolloutManager(load_config(settings)) as manager:
        print(READY, flush=True)
        for step in range(len(lines_of(checkpoint)), steps):
            result = await manager.collect(tasks_of(step, tasks), step=step)
            report = result.report
            line = {
                "step": step,
                "planned": report.planned,
                "outcomes": {outcome.value: n for outcome, n in report.outcomes.items() if n},
                "resumed": report.resumed,
                "reattached": report.reattached,
                "rows": rows_of(result.rollouts),
            }
            append(checkpoint, line)


async def supervise(work: Path, options: argparse.Namespace, kills: int) -> dict[str, Any]:
    """Run the trainer with the given number of kills and return the counts."""
    steps, tasks, seed = options.steps, options.tasks, options.seed
    checkpoint = work / "checkpoint.jsonl"
    draw = random.Random(seed)
    began, killed = time.monotonic(), 0
    with ScriptedEngine(answer) as engine:
        if options.asynchronous:
            engine.replies = answers(checkpoint.with_suffix(".version"), engine)
        async with LocalCloud(AGENT, run_dir=work / "cloud", limits=EmulatorLimits(grace_s=2.0)) as cloud:
            settings = write_settings(work, {"kind": "external", "urls": [engine.url]}, cloud)
            command = [
                *(sys.executable, __file__, "--trainer", str(settings), str(checkpoint)),
                *("--steps", str(steps), "--tasks", str(tasks), "--save-every", str(options.save_every)),
                *(["--asynchronous"] if options.asynchronous else []),
            ]
            due = sorted(draw.choices(range(steps), k=kills))  # the number of steps before each kill, at least
            while True:
                log = work / f"trainer-{killed}.log"
                trainer = ServerProcess("the trainer", command, log, {**os.environ, **cloud.environ})
                await trainer.start()
                ended = asyncio.create_task(trainer.wait())
                while not ended.done() and (killed == kills or len(lines_of(checkpoint)) < due[killed]):
                    await asyncio.wait({ended}, timeout=0.02)
                at = len(lines_of(checkpoint))
                if draw.random() < 0.9:  # kill the others during their start
                    while READY not in log.read_text() and not ended.done():
                        await asyncio.wait({ended}, timeout=0.02)
                after = draw.random() * _STEP_S
                await asyncio.wait({ended}, timeout=after)
                if ended.done():
                    if trainer.returncode == 0:
                        break
                    sys.exit(f"the trainer failed without being killed. {trainer.log_tail()}")
                os.kill(trainer.pid, signal.SIGKILL)
                await ended
                killed += 1
                done = len(lines_of(checkpoint))
                print(f"  kill {killed}: {after:.1f} s into step {at}; {done} are done", flush=True)
            open_sessions = (await cloud.sessions())["sessions"]
            _, twice = await stored_and_run_again(cloud)
    lines = lines_of(checkpoint)
    outcomes = sum((Counter(line["outcomes"]) for line in lines), Counter())
    return {
        "steps": len(lines),
        "kills": killed,
        "planned": sum(line["planned"] for line in lines),
        "unaccounted": sum(line["planned"] for line in lines) - outcomes.total(),
        "outcomes": outcomes,
        "reused from before a kill": sum(line["resumed"] for line in lines),
        "re-attached": sum(line["reattached"] for line in lines),
        "finished and run again": twice,
        "sessions open at the end": len(open_sessions),
        "seconds": round(time.monotonic() - began),
        **({"oldest": max(line["age"] for line in lines)} if options.asynchronous else {}),
        "rows": sorted(row for line in lines for row in line["rows"]),
    }


async def stored_and_run_again(cloud: LocalCloud) -> tuple[int, int]:
    """Count the results in S3, and the sessions that, by the agents' logs, started after their rollout's result."""
    finished: dict[str, float] = {}
    async with cloud.storage.s3() as s3:
        folder = step_prefix("", RUN, 0).rstrip("/").rpartition("/")[0] + "/"
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=cloud.storage.bucket, Prefix=folder)
        async for page in pages:
            for item in page.get("Contents", ()):
                name = parse_result_key("", RUN, item["Key"])
                if name.attempt is None:
                    finished[name.rollout_id] = item["LastModified"].timestamp()
    accepted = re.compile(r"^(\S+ \S+) INFO agent_wrapper: rollout (\S+) accepted in session", re.MULTILINE)
    return len(finished), sum(
        datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp() > finished.get(rollout_id, math.inf) + 1.0
        for log in cloud.runtime.session_logs.glob("*.log")
        for when, rollout_id in accepted.findall(log.read_text(errors="replace"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=4, help="tasks per step; two rollouts each")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/kill_trainer"))
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--save-every", type=int, default=1, help="steps; with --asynchronous")
    parser.add_argument("--trainer", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        if options.asynchronous:
            work = train_asynchronously(*options.trainer, options.steps, options.tasks, options.save_every)
        else:
            work = train(*options.trainer, options.steps, options.tasks)
        asyncio.run(work)
        return
    for name in ("calm", "killed"):
        shutil.rmtree(options.work / name, ignore_errors=True)
        (options.work / name).mkdir(parents=True)
        (options.work / name / "checkpoint.jsonl").write_text("")
    print("undisturbed:")
    calm = asyncio.run(supervise(options.work / "calm", options, 0))
    print("disturbed:")
    wild = asyncio.run(supervise(options.work / "killed", options, options.kills))
    same = calm.pop("rows") == wild.pop("rows")
    print(json.dumps({"undisturbed": calm, "disturbed": wild, "same training rows": same}, indent=1))
    bad = wild["unaccounted"] or wild["finished and run again"] or wild["sessions open at the end"] or not same
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
