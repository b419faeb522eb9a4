"""What a program of this folder does with its work, which is its argument as JSON.

It needs the standard library only: rivals' environments run it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

Work = dict[str, Any]
Receive = Callable[[str], None]
"""Is called with the id of each rollout as soon as the trainer has its result."""


class Step:
    """Measures a step that starts now. Its process is alone on the core."""

    def __init__(self, core: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory starts again
        self._had: dict[str, float] = {}
        self._before, self._began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()

    def receive(self, rollout_id: str) -> None:
        self._had[rollout_id] = time.monotonic()

    def spent(self) -> dict[str, Any]:
        """Return what was spent until now."""
        after = resource.getrusage(resource.RUSAGE_SELF)
        [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return {
            "had": self._had,
            "last_s": max(self._had.values()) - self._began,
            "cpu_s": after.ru_utime + after.ru_stime - self._before.ru_utime - self._before.ru_stime,
            "peak_mib": int(peak.split()[1]) / 1024,
        }


async def measure(work: Work, collect: Callable[[str, int, Receive], Awaitable[None]]) -> None:
    """Collect a few rollouts whose ids begin with `warm`, then those of the work, and print what these cost."""
    await collect("warm", work["warm_up"], lambda rollout_id: None)
    call(work["url"], "reset")
    step = Step(work["core"])
    await collect("task", work["rollouts"], step.receive)
    print(json.dumps(step.spent() | call(work["url"], "log")), flush=True)


def call(url: str, name: str) -> Any:
    """Call the emulator's own interface."""
    with urllib.request.urlopen(f"{url}/_emulator/{name}", timeout=60) as reply:
        return json.load(reply)


def hand_over(group: str, reward: float | None, tokens: Sequence[int]) -> None:
    """Print a rollout that is trained."""
    print(json.dumps({"group": group, "reward": reward, "tokens": tokens}), flush=True)


def ended(notes: Counter[str]) -> None:
    """Print that the step ended by itself, and why rollouts are missing."""
    print(json.dumps({"ended": notes}), flush=True)


def main(*ways: Callable[[Work], Awaitable[None]]) -> None:
    """Do the work in the way that it names."""
    work = json.loads(sys.argv[1])
    os.environ["AWS_ENDPOINT_URL"] = work["url"]
    [way] = [each for each in ways if each.__name__ == work["way"]]
    asyncio.run(way(work))
