"""Plays many seeds on all cores, and stops at the first that breaks a promise."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from rollout_backend.sim.mutants import mutated
from rollout_backend.sim.run import Verdict, simulate


@dataclass
class Tally:
    """What all the histories came to. `failed` is the first that broke a promise, by the order of the seeds."""

    seeds: int = 0
    lives: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: Verdict | None = None


def play(seed: int, mutant: str | None = None) -> Verdict:
    """One seed, in the production code or in a variant of it that is broken on purpose."""
    with mutated(mutant) if mutant else nullcontext():
        return simulate(seed)


def chaos(
    seeds: Iterable[int], mutant: str | None = None, on_verdict: Callable[[Verdict], None] = lambda verdict: None
) -> Tally:
    """Plays the seeds until one fails."""
    tally = Tally()
    # Fresh interpreters: what this process has loaded and patched must not decide a history.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for verdict in pool.imap(partial(play, mutant=mutant), seeds, chunksize=4):
            tally.seeds += 1
            tally.lives += verdict.lives
            tally.outcomes.update(verdict.outcomes)
            on_verdict(verdict)
            if verdict.broken is not None:
                tally.failed = verdict
                pool.terminate()
                break
    return tally
