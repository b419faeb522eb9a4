"""Measure how fast, and at what cost, a run collects its results: `python benchmarks/collection.py`.

A step is collected from `benchmarks/emulator.py`, whose agents call no model and publish ready-made, sealed results.
After a short step to warm up, the trainer's process has one core, and the emulator another. With `--rivals`, others
do some of the same work, each as its own documentation or training script does. The first run installs them from the
package index: see `rivals/environments.py`.

- ours: `RolloutManager`. It has a rollout once it is decoded, its seal verified, and it is in the run's folder.
- bare HTTP: unsigned calls, which show what the transport allows. It decodes nothing.
- checked HTTP: the same calls, signed, with each session on record, and each result decoded, verified and stored. It
  shows what the libraries below ours allow.
- boto3: the client that most would write first, in 100 lines. It decodes nothing.
- toolkit, S3 and HTTP: agentcore-rl-toolkit's two clients. Their agents' results have as many bytes as ours.
- agentlightning: its store, with agents that reach it directly.

Figures:

- `p50`, `p99`: from the end of an agent's PUT until the trainer has the rollout.
- `CPU`: user and system time of the trainer's process during the step, per rollout.
- `calls`: to AWS, per rollout.
- `closing`: from the last result until the step has ended.
- `peak`: resident memory of the trainer's process.

A system that cannot be installed, or does not end in time, has no figures; what it said is in `failed`.
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
SECRET = "the secret of a load test, 32 characters"


@dataclass(frozen=True)
class Work:
    rollouts: int
    rate: float = AT_ONCE
    tokens: int = 1200
    agent_s: float = 1.0
    spread: float = 0.5
    warm_up: int = 64


COMPARED = (Work(512, rate=25), Work(1024))
FLOORS = (*COMPARED, Work(1024, tokens=16_000), Work(4096))
TABLE = (
    *(Work(512, rate=25), Work(1024, rate=200), Work(64), Work(256), Work(1024), Work(1024, tokens=16_000)),
    *(Work(1024, tokens=160_000), Work(4096), Work(16_384)),
)


@dataclass(frozen=True)
class System:
    name: str
    script: str
    package: str | None = None  # None: our own environment
    kind: str = ""
    agents: str = "ours"  # that the emulator runs; "" for none
    works: tuple[Work, ...] = COMPARED


OURS = System("ours", "collect_by_us.py", works=TABLE)
RIVALS = (
    System("bare HTTP", "collect_by_bare_http.py", works=FLOORS[1:]),
    System("checked HTTP", "collect_by_checked_http.py", works=FLOORS),
    System("boto3 in threads", "collect_by_boto3.py"),
    System("toolkit, S3", "collect_by_toolkit.py", "agentcore-rl-toolkit", "s3", "toolkit"),
    System("toolkit, HTTP", "collect_by_toolkit.py", "agentcore-rl-toolkit", "http", "toolkit"),
    System("agentlightning", "collect_by_agentlightning.py", "agentlightning", agents=""),
)


async def measure(system: System, work: Work, timeout_s: float, flame: Path | None) -> dict[str, Any]:
    """Return a system's figures. Raises RivalFailed."""
    python = python_of(system.package) if system.package else Path(sys.executable)
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    with kept_folder() as folder:
        asked = {
            **asdict(work),
            "url": f"http://127.0.0.1:{port}",
            "port": port,
            "arn": ARN,
            "kind": system.kind,
            "bytes": 8 * work.tokens,
            "core": cores[0],
            "agents_core": cores[-1],
            "secret": SECRET,
            "folder": str(folder),
            "flame": flame and str(flame),
        }
        emulator = await start_emulator(asked, system.agents, folder) if system.agents else None
        try:
            argv = [str(python), str(HERE / "rivals" / system.script), json.dumps(asked)]
            done = await asyncio.to_thread(run, argv, environment(ours=system.package is None), timeout_s)
            lines = done.splitlines()
            log = call(asked["url"], "log") if emulator is not None else None
        finally:
            if emulator is not None:
                await emulator.stop()
    published = log["published"] if log is not None else json.loads(lines.pop())["published"]
    spent = {"calls": log["calls"] if log else {}, **json.loads(lines.pop())}
    return figures(system, work, spent, {key.rpartition("/")[2]: at for key, at in published.items()})


async def start_emulator(asked: dict[str, Any], agents: str, logs: Path) -> ServerProcess:
    options = {"--agents": agents, **{f"--{name}": asked[name] for name in ("port", "tokens", "spread", "secret")}}
    words = [str(word) for option in ({**options, "--agent-s": asked["agent_s"]}).items() for word in option]
    argv = [sys.executable, str(HERE / "emulator.py"), *words]
    emulator = ServerProcess("the emulator", argv, logs / "emulator.log")
    await emulator.start()
    await emulator.wait_healthy(lambda: answers(asked["url"]), 60)
    assert emulator.pid is not None
    os.sched_setaffinity(emulator.pid, {asked["agents_core"]})
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


def figures(system: System, work: Work, spent: dict[str, Any], published: dict[str, float]) -> dict[str, Any]:
    latencies = [at - published[rollout_id] for rollout_id, at in spent["had"].items()]
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        **head(system, work),
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "max_s": max(latencies),
        "cpu_ms": 1000 * spent["cpu_s"] / work.rollouts,
        "calls": {name: count / work.rollouts for name, count in spent["calls"].items()},
        "peak_mib": spent["peak_mib"],
        "closing_s": spent["closing_s"],
        "step_s": spent["seconds"],
    }


def head(system: System, work: Work) -> dict[str, Any]:
    version = version_of(system.package) if system.package else ""
    return {"system": system.name, "version": version, **asdict(work)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rival.name for rival in RIVALS]
    parser.add_argument(
        "--rivals", nargs="*", choices=names, help="measure these instead of ours; without names, all"
    )
    parser.add_argument("--rollouts", type=int, help="of one step; by default, the steps of the table")
    parser.add_argument("--rate", type=float, default=AT_ONCE, help="sessions per second; at once by default")
    parser.add_argument("--tokens", type=int, default=1200, help="per result; 1,200 are 10 KB, 16,000 are 110 KB")
    parser.add_argument("--agent-s", type=float, default=1.0, help="how long an agent works")
    parser.add_argument("--timeout-s", type=float, default=400, help="of one system and step")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--flame", type=Path, help="write a flame graph of our step to this file (SVG, or .txt)")
    options = parser.parse_args()
    asked = (Work(options.rollouts, options.rate, options.tokens, options.agent_s),) if options.rollouts else ()
    wanted = ["ours"] if options.rivals is None else options.rivals or names
    found: list[dict[str, Any]] = []
    with kept_folder():
        for work in asked or TABLE:
            for system in (OURS, *RIVALS):
                if system.name not in wanted or work not in (asked or system.works):
                    continue
                try:
                    found.append(asyncio.run(measure(system, work, options.timeout_s, options.flame)))
                except RivalFailed as error:
                    found.append({**head(system, work), "failed": str(error)})
                print(json.dumps(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.rivals is None and any("failed" in one for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
