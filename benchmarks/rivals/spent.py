"""Print what a trainer's process spends on a step, and what it has of it.

It needs the standard library only: rivals' environments run it.
"""

from __future__ import annotations

import json
import os
import resource
import time
import urllib.request
from pathlib import Path
from typing import Any


class Step:
    """A step whose rollouts are handed over with `receive`."""

    def __init__(self, core: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory starts again
        self._had: dict[str, float] = {}
        self._closed = 0.0
        self._before, self._began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()

    def receive(self, rollout_id: str) -> None:
        """Note that the trainer has a rollout's result."""
        self._had[rollout_id] = time.monotonic()

    def close_one(self) -> None:
        """Note that a rollout's session is closed, if that comes after its result."""
        self._closed = time.monotonic()

    def print(self, **more: Any) -> None:
        """Print what was spent as JSON, once everything is closed."""
        ended, after = max(self._closed, *self._had.values()), resource.getrusage(resource.RUSAGE_SELF)
        [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        spent = {
            "had": self._had,
            "seconds": ended - self._began,
            "closing_s": ended - max(self._had.values()),
            "cpu_s": after.ru_utime + after.ru_stime - self._before.ru_utime - self._before.ru_stime,
            "peak_mib": int(peak.split()[1]) / 1024,
            **more,
        }
        print(json.dumps(spent), flush=True)


def call(url: str, name: str) -> Any:
    """Call the emulator's own interface."""
    with urllib.request.urlopen(f"{url}/_emulator/{name}", timeout=60) as reply:
        return json.load(reply)


def hand_over(group: str, reward: float | None, **whose: Any) -> None:
    """Print a rollout that is trained, with its `tokens`, or the `session` whose tokens the gateway has."""
    print(json.dumps({"group": group, "reward": reward, **whose}), flush=True)


def ended(notes: dict[str, int]) -> None:
    """Print that the step ended by itself, and why rollouts are missing."""
    print(json.dumps({"ended": notes}), flush=True)
