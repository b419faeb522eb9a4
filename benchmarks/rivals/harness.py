"""What a program of this folder does with its work, which is its argument as JSON, and the agents of `faults.py`.

It needs the standard library only: rivals' environments run it. docs/fault-bench.md explains how to write a program.
"""

import asyncio
import itertools
import json
import math
import os
import random
import resource
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

Work = dict[str, Any]
Receive = Callable[[str], None]
"""Is called with the id of each rollout as soon as the trainer has its result."""


async def measure(work: Work, collect: Callable[[str, int, Receive], Awaitable[None]]) -> None:
    """Collect a few rollouts whose ids begin with `warm`, then those of the work, and print what these cost."""
    await collect("warm", work["warm_up"], lambda rollout_id: None)
    call(work["url"], "reset")
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {work["core"]})
    Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240  # the peak of the memory starts again
    had: dict[str, float] = {}

    def receive(rollout_id: str) -> None:
        had[rollout_id] = time.monotonic()

    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    await collect("task", work["rollouts"], receive)
    after = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status").read_text()  # noqa: ASYNC240
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    spent = {
        "had": had,
        "last_s": max(had.values()) - began,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mib": int(peak.split()[1]) / 1024,
    }
    print(json.dumps(spent | call(work["url"], "log")), flush=True)


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


# --- agents that fail ---------------------------------------------------------------------------------------

TOKENS = 8  # of a session
LATE_S = 100.0
"""How long the agents of `agent_late` take, which is longer than any limit."""


def tokens_of(proof: int) -> list[int]:
    return list(range(TOKENS * proof, TOKENS * (proof + 1)))


@dataclass
class Truth:
    """What an agent truly did. Its tokens show `proof`."""

    proof: int
    group: str
    reward: float
    finished: bool = False
    """The agent has returned the reward."""
    open: bool = True
    """The agent's session is open. One whose process has ended is not, whatever it says."""
    pid: int = field(default_factory=os.getpid)


class Died(Exception):
    """The agent's container has died."""


@dataclass(kw_only=True)
class Agent(Truth):
    seconds: float
    fault: str
    """Empty unless the agent is the victim."""
    note: Callable[[Truth], object]

    async def run(self) -> float:
        """Return the reward, or raise as the agent does. One that is frozen never returns."""
        match self.fault:
            case "agent_dies":
                await asyncio.sleep(self.seconds / 2)
                self.end()
                raise Died
            case "agent_freezes":
                await asyncio.sleep(10 * LATE_S)
            case "agent_late":
                await asyncio.sleep(LATE_S)
            case _:
                await asyncio.sleep(self.seconds)
        if self.fault == "agent_raises":
            raise RuntimeError("the agent's code has a defect")
        if self.fault == "reward_nan":
            return math.nan
        self.finished = True
        self.note(self)
        return self.reward

    def end(self) -> None:
        self.open = False
        self.note(self)


class FailingAgents:
    """Makes agents. The second one of each group is the victim of the fault.

    `note` is called with each agent when it has begun, has finished, and is gone. Files in `folder` number the agents
    of a group, so that processes can share the groups.
    """

    def __init__(self, fault: str, folder: Path, note: Callable[[Truth], object]) -> None:
        self._fault, self._folder, self._note = fault, folder, note

    def make(self, group: str) -> Agent:
        nth = self._next_of(group)
        draw = random.Random(f"{group} {nth}")
        reward, seconds = draw.choice((0.25, 0.5, 1.0)), draw.uniform(1.0, 7.0)
        fault, proof = self._fault if nth == 1 else "", 100 * int(group[1:]) + nth + 1
        agent = Agent(proof, group, reward, seconds=seconds, fault=fault, note=self._note)
        self._note(agent)
        return agent

    def _next_of(self, group: str) -> int:
        for nth in itertools.count():
            with suppress(FileExistsError):
                (self._folder / f"{group}.{nth}").touch(exist_ok=False)
                return nth
        raise AssertionError


def failing_agents(work: Work) -> FailingAgents:
    """Return the agents of a rival's process. They tell the benchmark what is true by the file `truths`."""

    def note(agent: Truth) -> None:
        with Path(work["truths"]).open("a") as file:
            file.write(json.dumps({each.name: getattr(agent, each.name) for each in fields(Truth)}) + "\n")

    return FailingAgents(work["fault"], Path(work["folder"]), note)


def main(*ways: Callable[[Work], Awaitable[None]]) -> None:
    """Do the work in the way that it names. Child processes find the work in `FAULT_BENCH`."""
    work = json.loads(sys.argv[1])
    os.environ |= {"AWS_ENDPOINT_URL": work["url"], "FAULT_BENCH": sys.argv[1]}
    [way] = [each for each in ways if each.__name__ == work["way"]]
    asyncio.run(way(work))
