"""What a program of this folder does with its work, which is its argument as JSON, and the agents of `faults.py`.

It needs the standard library only: rivals' environments run it.
"""

import asyncio
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
from dataclasses import dataclass
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


def tokens_of(proof: int) -> list[int]:
    return list(range(TOKENS * proof, TOKENS * (proof + 1)))


@dataclass
class Truth:
    """What a session, or an attempt of agentlightning, truly was."""

    proof: int  # that its tokens show
    group: str
    reward: float
    finished: bool = False  # its agent returned the reward
    open: bool = True


class Died(Exception):
    """The agent's container has died."""


@dataclass(kw_only=True)
class Agent(Truth):
    seconds: float
    fault: str  # "" unless it is the victim
    note: Callable[[Truth], object]

    async def run(self) -> float:
        """Return the reward, or raise as the agent does. One that is frozen never returns."""
        match self.fault:
            case "agent_dies":
                await asyncio.sleep(self.seconds / 2)
                self.end()
                raise Died
            case "agent_freezes":
                await asyncio.Event().wait()
            case "agent_late":
                await asyncio.sleep(40.0)  # longer than any system lets it
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

    `note` is called with each agent when it has begun, has finished, and is gone.
    """

    def __init__(self, fault: str, note: Callable[[Truth], object]) -> None:
        self._fault, self._note = fault, note
        self._of_group: Counter[str] = Counter()

    def make(self, group: str) -> Agent:
        nth = self._of_group[group]
        self._of_group[group] += 1
        draw = random.Random(f"{group} {nth}")
        reward, seconds = draw.choice((0.25, 0.5, 1.0)), draw.uniform(1.0, 7.0)
        fault, proof = self._fault if nth == 1 else "", self._of_group.total()
        agent = Agent(proof, group, reward, seconds=seconds, fault=fault, note=self._note)
        self._note(agent)
        return agent


def main(*ways: Callable[[Work], Awaitable[None]]) -> None:
    """Do the work in the way that it names."""
    work = json.loads(sys.argv[1])
    os.environ["AWS_ENDPOINT_URL"] = work["url"]
    [way] = [each for each in ways if each.__name__ == work["way"]]
    asyncio.run(way(work))
