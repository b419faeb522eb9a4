"""Measure how fast, and at what cost, a run collects its results: `python benchmarks/collection.py`.

A step is collected from `emulator.py`, whose agents call no model and publish ready-made, sealed results. After a
short step to warm up, the trainer's process has one core, and the emulator another. `rivals/` has a program for each
system, which works as its own documentation or training script does; see `rivals/environments.py`.

- `p50`, `p99`: from the end of an agent's PUT until the trainer has the rollout. Ours is then decoded, verified, and
  in the run's folder.
- `calls`: to AWS, per rollout.
- `last`: from the start of the step to the last result.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from common import HERE, Unmeasured, arguments, compare, kept_folder, serving
from emulated_aws import ARN
from rivals.environments import command, environment

from rollout_backend.model.serving.server_process import free_port

AT_ONCE = 1e5  # sessions per second
TIMEOUT_S = 400  # of one system and step
WARM_UP = 64  # rollouts before a measurement
SECRET = "the secret of a load test, 32 characters"


@dataclass(frozen=True)
class Work:
    rollouts: int
    rate: float = AT_ONCE
    tokens: int = 1200
    agent_s: float = 1.0


COMPARED = (Work(512, rate=25), Work(1024))
FLOOR = (*COMPARED, Work(1024, tokens=16_000), Work(4096))
TABLE = (*FLOOR, Work(1024, tokens=160_000), Work(1024, rate=200), Work(64), Work(256), Work(16_384))
SYSTEMS: dict[str, tuple[str, str, tuple[Work, ...]]] = {  # program, way, and works
    "ours": ("ours", "collect", TABLE),
    "checked HTTP": ("checked_http", "collect", FLOOR),
    "boto3 in threads": ("boto3_threads", "collect", COMPARED),
    "toolkit, S3": ("toolkit", "collect_by_s3", COMPARED),
    "toolkit, HTTP": ("toolkit", "collect_by_http", COMPARED),
}


async def measure(system: str, work: Work) -> dict[str, Any]:
    """Return a system's figures. Raises Unmeasured."""
    program, way, _ = SYSTEMS[system]
    cores, port = sorted(os.sched_getaffinity(0)), free_port()
    with kept_folder() as folder:
        asked = {
            **asdict(work),
            "warm_up": WARM_UP,
            "way": way,
            "url": f"http://127.0.0.1:{port}",
            "port": port,
            "arn": ARN,
            "core": cores[0],
            "secret": SECRET,
            "folder": str(folder),
        }
        emulator = [sys.executable, str(HERE / "emulator.py"), json.dumps(asked)]
        async with serving(emulator, port, folder / "emulator.log", cores[-1]):
            try:
                done = await asyncio.to_thread(
                    subprocess.run,
                    [*command(program), json.dumps(asked)],
                    env=environment(program),
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise Unmeasured(f"did not end within {TIMEOUT_S} s") from None
    if done.returncode:
        raise Unmeasured(f"ended with {done.returncode}: {done.stderr[-1000:]}")
    spent = json.loads(done.stdout.splitlines()[-1])
    latencies = [at - spent["published"][rollout_id] for rollout_id, at in spent["had"].items()]
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "cpu_ms": 1000 * spent["cpu_s"] / work.rollouts,
        "calls": sum(spent["calls"].values()) / work.rollouts,
        "last_s": spent["last_s"],
        "peak_mib": spent["peak_mib"],
    }


def main() -> None:
    options = arguments(__doc__).parse_args()

    def one(system: str, work: Work) -> dict[str, Any] | None:
        if options.smoke or work in SYSTEMS[system][2]:
            return asyncio.run(measure(system, work))
        return None

    compare(options.json, SYSTEMS, one, [Work(64)] if options.smoke else TABLE)


if __name__ == "__main__":
    main()
