"""Measure whether a long run leaks resources: `python benchmarks/long_run.py --steps 100 --tasks 25`.

Runs four rollouts of each task, 10,000 by default, through all parts of a run: router, gateway, S3, SQS and agents
over HTTP. The model answers by rule. Every `--every` steps it prints the memory and open files of the trainer's and
the gateway's processes, the trainer's event loop tasks and threads, and the size of the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from rollout_backend.config import load_config
from rollout_backend.core.tasks import Task
from rollout_backend.local.cloud import LocalStorage
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.manager import RolloutManager
from rollout_backend.serving.server_process import ServerProcess, free_port

AGENT = Path(__file__).parent.parent / "examples" / "arithmetic" / "agent.py"
GROUP = 4
COLUMNS = (
    "step", "rollouts", "completed", "s/step", "trainer MiB", "files", "tasks", "threads", "objects", "gateway MiB",
    "its files", "logs KiB",
)  # fmt: skip


def mebibytes(pid: int) -> float:
    """Return the process's resident memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(module: bytes) -> list[int]:
    """Return the pids of the children of this process that run a module."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # the process has ended
        if int(parent) == os.getpid() and module in command:
            found.append(int(entry.name))
    return sorted(found)


def tasks_of(step: int, count: int) -> list[Task]:
    draw = random.Random(step)
    pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(count)]
    return [Task(f"s{step}-{i}", {"question": f"{a} + {b}?", "answer": str(a + b)}) for i, (a, b) in enumerate(pairs)]


async def answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{url}/ping")).status_code == 200
    except httpx.HTTPError:
        return False


async def run(work: Path, steps: int, tasks: int, every: int) -> Table:
    table = Table(*COLUMNS)
    with ScriptedEngine(lambda prompt: f"It is {len(prompt)}.") as engine:
        async with LocalStorage(run_dir=work / "cloud") as storage:
            os.environ.update(storage.environ)
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            environ = {**os.environ, "PORT": str(port), "AWS_ENDPOINT_URL": storage.endpoint_url}
            agents = ServerProcess("the agents", [sys.executable, str(AGENT)], work / "agents.log", environ)
            await agents.start()
            try:
                await agents.wait_healthy(lambda: answers(url), 60)
                config = load_config(
                    env={},
                    base={
                        "run_id": "long-run",
                        "model": {
                            "path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 4096,
                        },
                        "serving": {"kind": "external", "urls": [engine.url]},
                        "runtime": {"kind": "http", "url": url, "invoke_per_s": 200, "max_sessions": 64},
                        "aws": {"region": storage.region, "endpoint_url": storage.endpoint_url},
                        "storage": {"bucket": storage.bucket},
                        "group": {"size": GROUP},
                        "output_dir": str(work / "runs"),
                    },
                )  # fmt: skip
                await measure(RolloutManager(config), engine, table, work, steps, tasks, every)
            finally:
                await agents.stop()
    return table


async def measure(
    manager: RolloutManager, engine: ScriptedEngine, table: Table, work: Path, steps: int, tasks: int, every: int
) -> None:
    rollouts = completed = 0
    async with manager:
        [gateway], began = children(b"rollout_backend.gateway"), time.monotonic()
        for step in range(steps):
            report = (await manager.collect(tasks_of(step, tasks))).report
            engine.requests.clear()  # the engine runs in this process and keeps every request
            engine._scripts.clear()
            rollouts += report.planned
            completed += report.outcomes["completed"]
            if not report.balanced:
                sys.exit(f"step {step} does not reconcile")
            if (step + 1) % every and step + 1 != steps:
                continue
            gc.collect()
            logs = sum(path.stat().st_size for path in (work / "runs").rglob("*.log"))
            row = (
                step + 1, rollouts, completed, f"{(time.monotonic() - began) / (step + 1):.1f}",
                f"{mebibytes(os.getpid()):.0f}", files(os.getpid()), len(asyncio.all_tasks()),
                threading.active_count(), len(gc.get_objects()), f"{mebibytes(gateway):.0f}", files(gateway),
                f"{logs / 1024:.0f}",
            )  # fmt: skip
            table.add_row(*map(str, row))
            print(dict(zip(COLUMNS, row, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=25, help="tasks per step; four rollouts each")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--work", type=Path, default=Path("runs/long_run"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    Console(width=150).print(asyncio.run(run(options.work.absolute(), options.steps, options.tasks, options.every)))


if __name__ == "__main__":
    main()
