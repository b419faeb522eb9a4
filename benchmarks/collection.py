"""Measure how fast, and at what cost, a run collects its results: `python benchmarks/collection.py`.

A `RolloutManager` with default settings, except for the runtime's rates and number of sessions, runs one step against
`benchmarks/emulator.py`. Its agents call no model and publish ready-made, sealed results. After a short step to warm
up, the trainer's process has one core, and the emulator another.

- `p50`, `p99`: from the end of an agent's PUT until the trainer has the rollout, decoded, its seal verified, and
  stored in the run's folder: the call of `on_group`, with one rollout per group.
- `CPU`: user and system time of the trainer's process during the step, per rollout. `rows` is that of making verl's
  rows of it; it needs verl's environment.
- `calls`: to AWS, per rollout.
- `closing`: from the last result until `collect` returns.
- `peak`: resident memory of the trainer's process.
- `others`: what other processes took of the trainer's core. Above some percent, the latencies mean nothing.

The scenarios of the table are measured if none is named; `--rollouts` measures others:

    python benchmarks/collection.py --rollouts 1024 --rate 25 --tokens 16000 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulated_aws.agentcore import ARN
from flame_graph import record
from kept_folder import kept_folder
from rich.console import Console
from rich.table import Table

from rollout_backend.config import RolloutConfig
from rollout_backend.core.tasks import Task
from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.manager import RolloutManager
from rollout_backend.results.step_report import GroupResult, StepResult
from rollout_backend.serving.server_process import ServerProcess, free_port

HERE = Path(__file__).parent
SECRET = "the secret of a load test, 32 characters"
AT_ONCE = 1e5  # sessions per second
WARM_UP = 64
COLUMNS = (
    "rollouts", "per s", "tokens", "p50 ms", "p99 ms", "max ms", "CPU ms", "of it sys", "rows ms", "calls",
    "peak MiB", "closing s", "step s", "invokes/s", "others",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    rollouts: int
    rate: float = AT_ONCE
    tokens: int = 1200
    agent_s: float = 1.0
    spread: float = 0.5
    rows: bool = False


TABLE = (
    Scenario(512, rate=25),
    Scenario(1024, rate=200),
    Scenario(64),
    Scenario(256),
    Scenario(1024),
    Scenario(1024, tokens=16_000),
    Scenario(1024, tokens=160_000),
    Scenario(4096),
    Scenario(16_384),
)


@dataclass
class Measurement:
    """Times in seconds; `cpu_s` and `calls` are totals."""

    scenario: Scenario
    seconds: float
    latencies: list[float]
    closing_s: float
    user_s: float
    system_s: float
    rows_s: float | None
    peak_bytes: int
    calls: dict[str, int]
    invokes_per_s: float
    emulator_s: float  # of CPU
    others: float  # part of the core's time
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s

    def percentiles(self) -> tuple[float, float, float]:
        cuts = statistics.quantiles(self.latencies, n=100, method="inclusive")
        return cuts[49], cuts[98], max(self.latencies)

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON, per rollout where that makes sense."""
        n, (p50, p99, most) = self.scenario.rollouts, self.percentiles()
        return {
            **dataclasses.asdict(self.scenario),
            "p50_s": p50,
            "p99_s": p99,
            "max_s": most,
            "cpu_ms": 1000 * self.cpu_s / n,
            "system_cpu_ms": 1000 * self.system_s / n,
            "rows_cpu_ms": None if self.rows_s is None else 1000 * self.rows_s / n,
            "calls": {name: count / n for name, count in sorted(self.calls.items())},
            "peak_mib": self.peak_bytes / 2**20,
            "closing_s": self.closing_s,
            "step_s": self.seconds,
            "invokes_per_s": self.invokes_per_s,
            "emulator_cpu_ms": 1000 * self.emulator_s / n,
            "others": self.others,
            "outcomes": self.outcomes,
        }

    def row(self) -> list[str]:
        made, rate = self.summary(), self.scenario.rate
        return [
            f"{self.scenario.rollouts:,}",
            "at once" if rate == AT_ONCE else f"{rate:g}",
            f"{self.scenario.tokens:,}",
            *(f"{1000 * each:.0f}" for each in self.percentiles()),
            f"{made['cpu_ms']:.2f}",
            f"{made['system_cpu_ms']:.2f}",
            "" if self.rows_s is None else f"{made['rows_cpu_ms']:.2f}",
            f"{sum(made['calls'].values()):.2f}",
            f"{made['peak_mib']:.0f}",
            f"{self.closing_s:.2f}",
            f"{self.seconds:.1f}",
            f"{self.invokes_per_s:.0f}",
            f"{self.others:.0%}",
        ]


# --- the trainer's process ---------------------------------------------------------------------------------


def settings(scenario: Scenario, url: str, work: Path) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "run_id": "collection",
            "model": {"path": BYTE_MODEL, "name": "scripted", "renderer": "chatml", "context_length": 65536},
            "serving": {"kind": "external", "urls": [url]},
            "runtime": {
                "kind": "agentcore",
                "arn": ARN,
                "endpoint_url": url,
                "invoke_per_s": scenario.rate,
                "stop_per_s": scenario.rate,
                "max_sessions": max(WARM_UP, scenario.rollouts),
            },
            "aws": {"region": "us-east-1", "endpoint_url": url},
            "storage": {"bucket": "results"},
            "gateway": {"secret": SECRET},
            "output_dir": work,
        }
    )


def tasks_of(count: int) -> list[Task]:
    return [Task(f"task-{i}", {"question": f"What is {i} + {i}?", "answer": str(2 * i)}) for i in range(count)]


async def measure(scenario: Scenario, url: str, work: Path, core: int, flame: str | None) -> Measurement:
    async with RolloutManager(settings(scenario, url, work)) as manager:
        pin(core)
        await manager.collect(tasks_of(WARM_UP))
        call(url, "reset")
        forget_peak()
        tasks, had = tasks_of(scenario.rollouts), dict[str, float]()

        def on_group(group: GroupResult) -> None:
            now = time.monotonic()
            had.update((rollout.rollout_id, now) for rollout in group.rollouts)

        emulator_s = call(url, "log")["cpu_s"]
        if flame is not None:
            record(os.getpid(), Path(flame))
        busy_s = busy_seconds(core)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        result = await manager.collect(tasks, on_group=on_group)
        ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        own_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        peak = peak_bytes()
        log = call(url, "log")
        published = {key.rpartition("/")[2]: at for key, at in log["published"].items()}
        invoked = log["invoked"]
        return Measurement(
            scenario,
            seconds=ended - began,
            latencies=[at - published[rollout_id] for rollout_id, at in had.items()],
            closing_s=ended - max(had.values()),
            user_s=after.ru_utime - before.ru_utime,
            system_s=after.ru_stime - before.ru_stime,
            rows_s=make_rows(result) if scenario.rows else None,
            peak_bytes=peak,
            calls=log["calls"],
            invokes_per_s=(len(invoked) - 1) / (invoked[-1] - invoked[0]),
            emulator_s=log["cpu_s"] - emulator_s,
            others=max(0.0, busy_seconds(core) - busy_s - own_s) / (time.monotonic() - began),
            outcomes={outcome: count for outcome, count in result.report.outcomes.items() if count},
        )


def busy_seconds(core: int) -> float:
    """Return for how long the core has worked since the machine was started."""
    [line] = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")]
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def make_rows(result: StepResult) -> float:
    """Return the CPU seconds of making verl's rows."""
    from rollout_backend.verl.rows import rows_of  # needs verl's environment

    began = time.process_time()
    for rollout in result.rollouts:
        assert rows_of(rollout, 1024, 1_000_000)
    return time.process_time() - began


def pin(core: int) -> None:
    """Give all threads of this process one core. What it has started keeps all cores."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def forget_peak() -> None:
    """Let the peak of the resident memory start again."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def call(url: str, name: str) -> Any:
    with urllib.request.urlopen(f"{url}/_emulator/{name}", timeout=60) as reply:
        return json.load(reply)


# --- one process per scenario ------------------------------------------------------------------------------


async def answers(url: str) -> bool:
    try:
        await asyncio.to_thread(call, url, "log")
    except OSError:
        return False
    return True


async def run(scenario: Scenario, work: Path, flame: Path | None) -> Measurement:
    """Measure in a new process, with a new emulator."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {
        "--port": port,
        "--tokens": scenario.tokens,
        "--agent-s": scenario.agent_s,
        "--spread": scenario.spread,
        "--secret": SECRET,
    }
    argv = [sys.executable, str(HERE / "emulator.py"), *(str(word) for option in options.items() for word in option)]
    emulator = ServerProcess("the emulator", argv, work / "emulator.log")
    cores = sorted(os.sched_getaffinity(0))
    await emulator.start()
    try:
        await emulator.wait_healthy(lambda: answers(url), 60)
        assert emulator.pid is not None
        os.sched_setaffinity(emulator.pid, cores[-1:])
        where = {"url": url, "work": str(work), "core": cores[0], "flame": flame and str(flame)}
        one = json.dumps({**dataclasses.asdict(scenario), **where})
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--one", one),
            stdout=subprocess.PIPE,
            env={**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
        )
        output, _ = await trainer.communicate()
        if trainer.returncode:
            sys.exit(f"the trainer's process ended with {trainer.returncode}")
        fields = json.loads(output.splitlines()[-1])
        return Measurement(**{**fields, "scenario": scenario})
    finally:
        await emulator.stop()


def measure_here(asked: dict[str, Any]) -> None:
    """Measure in this process, and print the measurement as JSON."""
    url, work, core, flame = (asked.pop(name) for name in ("url", "work", "core", "flame"))
    found = asyncio.run(measure(Scenario(**asked), url, Path(work) / "runs", core, flame))
    print(json.dumps(dataclasses.asdict(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[], help="of one step; several are several steps")
    parser.add_argument("--rate", type=float, default=AT_ONCE, help="sessions per second; at once by default")
    parser.add_argument("--tokens", type=int, default=1200, help="per result; 1,200 are 10 KB, 16,000 are 110 KB")
    parser.add_argument("--agent-s", type=float, default=1.0, help="how long an agent works")
    parser.add_argument("--spread", type=float, default=0.5, help="agents take up to this part more or less")
    parser.add_argument("--rows", action="store_true", help="make verl's rows too; needs verl's environment")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--flame", type=Path, help="write a flame graph of the step to this file (SVG, or .txt)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        measure_here(options.one)
        return
    made = {name: getattr(options, name) for name in ("rate", "tokens", "agent_s", "spread", "rows")}
    scenarios = [Scenario(rollouts, **made) for rollouts in options.rollouts] or list(TABLE)
    table, found = Table(*COLUMNS), []
    with kept_folder():
        for scenario in scenarios:
            with kept_folder() as work:
                measured = asyncio.run(run(scenario, work, options.flame))
            found.append(measured.summary())
            table.add_row(*measured.row())
            if measured.outcomes != {"completed": scenario.rollouts}:
                print(f"not every rollout was completed: {measured.outcomes}", file=sys.stderr)
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1))
    Console(width=160).print(table)
    totals = Counter[str]()
    for each in found:
        totals.update(each["calls"])
    calls = Table("call", *(f"{each['rollouts']:,}" for each in found), title="calls per rollout")
    for name in sorted(totals):
        calls.add_row(name, *(f"{each['calls'].get(name, 0):.3f}" for each in found))
    Console(width=160).print(calls)


if __name__ == "__main__":
    main()
