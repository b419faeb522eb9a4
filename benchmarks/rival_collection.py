"""Measure how others collect the same work as `benchmarks/collection.py`, on the same emulator.

    python benchmarks/rival_collection.py

The first run installs the rivals from the package index: see `rivals/environments.py`. Each is used as its own
documentation or training script does. One core is the trainer's process's, the other the emulator's.

- bare HTTP: unsigned calls, which show what the transport allows. It decodes nothing.
- checked HTTP: the same calls, signed, with each session on record, and each result decoded, verified and stored. It
  shows what the libraries below ours allow.
- boto3: the client that most would write first, in 100 lines. It decodes nothing.
- toolkit, S3 and HTTP: agentcore-rl-toolkit's two clients. Their agents' results have as many bytes as ours.
- agentlightning: its store, with agents that reach it directly.

A rival that cannot be installed, or does not end in time, has no figures; what it said is in `failed`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from emulated_aws.agentcore import ARN
from kept_folder import kept_folder
from rivals.environments import RivalFailed, environment, python_of, tail, version_of
from rivals.spent import call

from rollout_backend.serving.server_process import ServerProcess, free_port

HERE = Path(__file__).parent
AT_ONCE = 1e5  # sessions per second
WARM_UP = 64
SECRET = "the secret of a load test, 32 characters"


@dataclass(frozen=True)
class Work:
    rollouts: int
    rate: float = AT_ONCE
    agent_s: float = 1.0
    spread: float = 0.5
    tokens: int = 1200
    warm_up: int = WARM_UP


TABLE = (Work(512, rate=25), Work(1024))
FLOORS = (*TABLE, Work(1024, tokens=16_000), Work(4096))


@dataclass(frozen=True)
class Rival:
    name: str
    script: str
    package: str | None = None  # None: our own environment
    kind: str = ""
    agents: str = "ours"  # that the emulator runs; "" for none
    works: tuple[Work, ...] = TABLE

    @property
    def version(self) -> str:
        return version_of(self.package) if self.package else ""


RIVALS = (
    Rival("bare HTTP", "collect_by_bare_http.py", works=FLOORS[1:]),
    Rival("checked HTTP", "collect_by_checked_http.py", works=FLOORS),
    Rival("boto3 in threads", "collect_by_boto3.py"),
    Rival("toolkit, S3", "collect_by_toolkit.py", "agentcore-rl-toolkit", "s3", "toolkit"),
    Rival("toolkit, HTTP", "collect_by_toolkit.py", "agentcore-rl-toolkit", "http", "toolkit"),
    Rival("agentlightning", "collect_by_agentlightning.py", "agentlightning", agents=""),
)


async def measure(rival: Rival, work: Work, timeout_s: float) -> dict[str, Any]:
    """Return a rival's figures. Raises RivalFailed."""
    python = python_of(rival.package) if rival.package else Path(sys.executable)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    cores = sorted(os.sched_getaffinity(0))
    asked = {
        **asdict(work),
        "url": url,
        "port": port,
        "arn": ARN,
        "kind": rival.kind,
        "bytes": 8 * work.tokens,
        "core": cores[0],
        "agents_core": cores[-1],
        "secret": SECRET,
    }
    with kept_folder() as folder:
        asked["folder"] = str(folder)
        emulator = await start_emulator(port, rival, work, folder) if rival.agents else None
        try:
            argv = [str(python), str(HERE / "rivals" / rival.script), json.dumps(asked)]
            env = environment() | ({} if rival.package else {"PYTHONPATH": str(HERE.parent)})
            done = await asyncio.to_thread(run, argv, env, timeout_s)
            lines = done.splitlines()
            log = call(url, "log") if emulator is not None else None
        finally:
            if emulator is not None:
                await emulator.stop()
    published = log["published"] if log is not None else json.loads(lines.pop())["published"]
    spent = json.loads(lines.pop())
    return figures(rival, work, spent, {key.rpartition("/")[2]: at for key, at in published.items()}, log)


async def start_emulator(port: int, rival: Rival, work: Work, logs: Path) -> ServerProcess:
    options = {
        "--port": port,
        "--agents": rival.agents,
        "--tokens": work.tokens,
        "--agent-s": work.agent_s,
        "--spread": work.spread,
        "--secret": SECRET,
    }
    words = [str(word) for option in options.items() for word in option]
    emulator = ServerProcess(
        "the emulator", [sys.executable, str(HERE / "emulator.py"), *words], logs / "emulator.log"
    )
    await emulator.start()
    await emulator.wait_healthy(lambda: answers(f"http://127.0.0.1:{port}"), 60)
    assert emulator.pid is not None
    os.sched_setaffinity(emulator.pid, {max(os.sched_getaffinity(0))})
    return emulator


async def answers(url: str) -> bool:
    try:
        await asyncio.to_thread(call, url, "log")
    except OSError:
        return False
    return True


def run(argv: list[str], env: dict[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise RivalFailed(f"did not end within {timeout_s:g} s") from None
    if done.returncode:
        raise RivalFailed(f"ended with {done.returncode}: {tail(done.stderr)}")
    return done.stdout


def figures(
    rival: Rival, work: Work, spent: dict[str, Any], published: dict[str, float], log: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what `benchmarks/collection.py` returns of ours."""
    latencies = [at - published[rollout_id] for rollout_id, at in spent["had"].items()]
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "system": rival.name,
        "version": rival.version,
        **asdict(work),
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "max_s": max(latencies),
        "cpu_ms": 1000 * spent["cpu_s"] / work.rollouts,
        "calls": {name: count / work.rollouts for name, count in log["calls"].items()} if log else {},
        "peak_mib": spent["peak_mib"],
        "closing_s": spent["closing_s"],
        "step_s": spent["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", nargs="*", choices=[rival.name for rival in RIVALS], help="default: all")
    parser.add_argument("--rollouts", type=int, help="of one step; by default, the steps of the table")
    parser.add_argument("--rate", type=float, default=AT_ONCE, help="sessions per second; at once by default")
    parser.add_argument("--agent-s", type=float, default=1.0, help="how long an agent works")
    parser.add_argument("--timeout-s", type=float, default=400, help="of one rival and step")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    asked = (Work(args.rollouts, args.rate, args.agent_s),) if args.rollouts else ()
    found: list[dict[str, Any]] = []
    with kept_folder():
        for work in asked or FLOORS:
            for rival in RIVALS:
                if (args.rivals and rival.name not in args.rivals) or work not in (asked or rival.works):
                    continue
                try:
                    found.append(asyncio.run(measure(rival, work, args.timeout_s)))
                except RivalFailed as error:
                    found.append(
                        {"system": rival.name, "version": rival.version, **asdict(work), "failed": str(error)}
                    )
                print(line(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def line(figures: dict[str, Any]) -> str:
    rate = "at once" if figures["rate"] == AT_ONCE else f"at {figures['rate']:g}/s"
    head = f"{figures['system']:18s} {figures['rollouts']:6d} {rate:8s} agents of {figures['agent_s']:g} s  "
    if "failed" in figures:
        return head + figures["failed"]
    times = "p50 {p50_s:.2f} s, p99 {p99_s:.2f} s, closing {closing_s:.1f} s, step {step_s:.1f} s".format(**figures)
    calls = sum(figures["calls"].values())
    return f"{head}{times}, CPU {figures['cpu_ms']:.1f} ms, {calls:.2f} calls, {figures['peak_mib']:.0f} MiB"


if __name__ == "__main__":
    main()
