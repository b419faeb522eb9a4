"""Measure a step of thousands of long rollouts, in the gateway and in the trainer: three sizes, three lengths.

    .venv-verl/bin/python benchmarks/large_step.py
    .venv-verl/bin/python benchmarks/large_step.py --sizes 128x40

Each size has three parts, which run one after another:

- One gateway process serves all sessions. In each turn every session calls the model at once, with its whole
  conversation, as OpenAI's client does. A turn samples 60 tokens and gets a tool's result of 640, so a session with
  40 turns ends with 32k tokens. Then each session fetches its trajectory.
- The trainer collects as many results with as many tokens, as in `collection.py`.
- The trainer makes rows of as many rollouts and puts them into a real TransferQueue, in groups of eight. verl's own
  trainer then computes advantages and metrics, for which it pads all rows to the longest.

All sizes take 40 minutes on two idle cores, the last one alone 20, with 16 GB of memory. CPU is user and system time
of the measured process, as other work on the machine changes it less than seconds. `load` is the load average
before a size began.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import collection
import gateway
from common import HERE, Unmeasured, arguments, compare, cpu_s, peak_bytes
from load_generator import Session

from rollout_backend.model.gateway.access import allow_files
from rollout_backend.model.serving.install import find_model

# Tokens of a tool's result, and of a session's first prompt. A reply has 60.
RESULT, FIRST = 640, 4000
REPLY = 60
# Trajectories that are fetched at a time.
FETCHES = 32
MIB = 2**20


@dataclass(frozen=True)
class Size:
    sessions: int
    turns: int

    @property
    def tokens(self) -> int:
        """The tokens of a session at its end."""
        return FIRST + self.turns * (REPLY + RESULT)


SIZES = (Size(1024, 10), Size(1024, 20), Size(1024, 40), Size(2048, 40), Size(4096, 40))


# --- the gateway ------------------------------------------------------------------------------------------


async def call(size: Size, model: Path) -> dict[str, Any]:
    middle = FIRST + size.turns * (REPLY + RESULT) // 2
    scenario = gateway.Scenario(middle, size.sessions, turns=size.turns, result=RESULT, results=40, limit_s=7200)
    began, refused, by_turn = time.monotonic(), Counter[str](), list[float]()

    async def one(session: Session) -> None:
        try:
            await session.call()
        except (OSError, ValueError) as error:
            refused[str(error)] += 1

    async with gateway.opened(scenario, model, "ours") as (sessions, pid, work):
        for _ in range(size.turns):
            before = cpu_s(pid)
            await asyncio.gather(*map(one, sessions))
            by_turn.append(1000 * (cpu_s(pid) - before) / len(sessions))
        peak, before = peak_bytes(pid), cpu_s(pid)
        trajectories = await fetch(sessions)
        fetching = cpu_s(pid) - before
        on_disk = sum(file.stat().st_size for file in (work / "journal").rglob("*") if file.is_file())
    quarter = size.turns // 4
    return {
        "refused": sum(refused.values()),
        "cpu_ms": sum(by_turn) / size.turns,
        "early_cpu_ms": sum(by_turn[1 : 1 + quarter]) / quarter,
        "late_cpu_ms": sum(by_turn[-quarter:]) / quarter,
        "gateway_mib": peak / MIB,
        "journal_kib": on_disk / len(sessions) / 1024,
        "trajectory_kib": trajectories / len(sessions) / 1024,
        "trajectory_cpu_ms": 1000 * fetching / len(sessions),
        "gateway_s": time.monotonic() - began,
    }


async def fetch(sessions: Sequence[Session]) -> int:
    """Fetch all trajectories, and return their bytes."""

    async def one(first: int) -> int:
        return sum([len(await session.fetch_trajectory()) for session in sessions[first::FETCHES]])

    return sum(await asyncio.gather(*map(one, range(FETCHES))))


# --- the trainer ------------------------------------------------------------------------------------------


def collected(size: Size) -> dict[str, Any]:
    found = asyncio.run(collection.measure("ours", collection.Work(size.sessions, tokens=size.tokens)))
    return {"collect_cpu_ms": found["cpu_ms"], "collect_mib": found["peak_mib"]}


def trained(size: Size) -> dict[str, Any]:
    """Raises Unmeasured."""
    command = [sys.executable, str(HERE / "large_rows.py"), json.dumps(asdict(size))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unmeasured(f"large_rows.py ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", nargs="*", help="sessions and turns, such as 128x40; default: all five")
    options = parser.parse_args()
    wanted = ["64x4"] if options.smoke else options.sizes
    sizes = [Size(*map(int, size.split("x"))) for size in wanted] if wanted else SIZES
    model = find_model()
    allow_files(5000)

    def one(_: str, size: Size) -> dict[str, Any]:
        load = os.getloadavg()[0]
        return {
            "tokens": size.tokens, "load": load, **asyncio.run(call(size, model)), **collected(size), **trained(size)
        }  # fmt: skip

    compare(options.json, ["ours"], one, sizes)


if __name__ == "__main__":
    main()
