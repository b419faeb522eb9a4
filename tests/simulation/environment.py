"""What all simulated services share: random numbers, time, and the history that they write.

Invariant: the services draw from `Environment.random` only, so a seed always plays the same history.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from random import Random

from tests.simulation.evidence import Evidence
from tests.simulation.faults import Faults, Situation

EPOCH = 1_700_000_000.0  # unix seconds at the start of each history


class Environment:
    """The random numbers, the clock and the history of one seed."""

    def __init__(self, seed: int, faults: Faults | None = None, severity: float = 1.0) -> None:
        """`faults` are drawn if there are none; see `Faults.draw`."""
        self.random = Random(seed)  # deterministic
        self.situation = Situation.of(seed) if faults is None else Situation()
        self.faults = Faults.draw(self.random, severity) if faults is None else faults
        self.faults = replace(self.faults, **self.situation.faults)
        self.history: list[str] = []
        self.evidence = Evidence()
        self._seed = seed
        self._silences = self.own_random("silence")
        self._numbers: defaultdict[str, int] = defaultdict(int)

    def own_random(self, name: str) -> Random:
        """Return random numbers that change no other draw of the seed."""
        return Random(f"{self._seed} {name}")

    def now(self) -> float:
        """Return the virtual time, in seconds since the start."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Return the virtual time in unix seconds."""
        return EPOCH + self.now()

    async def passes(self, up_to: float) -> None:
        """Let a random time pass, in seconds."""
        await asyncio.sleep(self.random.random() * up_to)

    def chance(self, fault: str) -> bool:
        """Return whether this kind of fault occurs now."""
        return self.random.random() < float(getattr(self.faults, fault))

    def is_silent(self, service: str) -> bool:
        """Return whether a call of this service gets no answer: the connection is accepted, and nothing follows."""
        return self._silences.random() < float(getattr(self.faults, f"silent_{service}"))

    def is_lost(self) -> bool:
        """Return whether a call without an answer has no effect either."""
        return self._silences.random() < 0.5

    def draw_times(self, within_s: float, lasts_s: float) -> tuple[float, float]:
        """Return the random start and end of a fault, in seconds from the start of the history."""
        since = self.random.random() * within_s
        return since, since + self.random.random() * lasts_s

    def number(self, kind: str) -> int:
        """Return 1, 2, ... for the objects of a kind."""
        self._numbers[kind] += 1
        return self._numbers[kind]

    def note(self, what: str) -> None:
        """Write an event to the history."""
        self.history.append(f"{self.now():9.3f} {what}")
