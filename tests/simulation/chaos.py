"""Plays many seeds on all cores and stops at the first violation."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.mutants import mutated
from tests.simulation.run import Verdict, simulate


@dataclass
class Tally:
    """Totals of all histories. `failed` is the first violation, in the order of the seeds."""

    seeds: int = 0
    trainers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: Verdict | None = None


def play(seed: int, mutant: str | None = None) -> Verdict:
    """Play one seed with the production code or with a broken variant."""
    with mutated(mutant) if mutant else nullcontext():
        return simulate(seed)


def chaos(
    seeds: Iterable[int], mutant: str | None = None, on_verdict: Callable[[Verdict], None] = lambda verdict: None
) -> Tally:
    """Play seeds until one fails."""
    tally = Tally()
    # Fresh interpreters, so that modules and patches of this process do not influence a history.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for verdict in pool.imap(partial(play, mutant=mutant), seeds, chunksize=4):
            tally.seeds += 1
            tally.trainers += verdict.trainers
            tally.outcomes.update(verdict.outcomes)
            on_verdict(verdict)
            if verdict.violation is not None:
                tally.failed = verdict
                pool.terminate()
                break
    return tally
