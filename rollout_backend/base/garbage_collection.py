"""Keep full runs of Python's garbage collector out of a step, and out of the calls of a server.

A full run stops the process while it visits every object: 0.3 s with 4,096 rollouts, and more in a trainer's process,
which holds many other objects. A step causes many, because each result stays. Collections of young objects continue.
"""

import gc
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_DURING_A_STEP = (50000, 20)
# A full run follows this many runs of younger objects, each after one million objects that were kept.
_RUNS_DURING_A_STEP = 10
_STEPS_BETWEEN_FULL_RUNS = 20
# Older objects are visited after 5 million that were kept: a server's are rarely garbage, and 375 open sessions of a
# gateway take 0.1 s to visit.
_OF_A_SERVER = (5000, 1000, 10)
# The thresholds, for each block that is being executed.
_before: list[tuple[int, int, int]] = []
# Counts the ends after which no block is being executed.
_ends = itertools.count(1)


class _Collections(threading.local):
    """The CPU time of the collections that a thread has made."""

    began_s = 0.0
    spent_s = 0.0

    def observe(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self.began_s = time.thread_time()
        else:
            self.spent_s += time.thread_time() - self.began_s


_collections = _Collections()


def own_thread_s() -> float:
    """Return this thread's CPU time without collections, which visit the objects of others. Call
    `exempt_loaded_objects` first, or they count."""
    return time.thread_time() - _collections.spent_s


def exempt_loaded_objects() -> None:
    """Exempt all present objects from collections, which then visit only what is made later. Call it at start.
    From then on, `own_thread_s` leaves collections out."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_OF_A_SERVER)
    gc.callbacks.append(_collections.observe)


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Run the block, and others that overlap it, with few full collections. The last to end restores the setting."""
    before = _before[-1] if _before else gc.get_threshold()
    # A threshold of 0 means that the process has switched the collector off.
    if not _before and before[0]:
        # The runs of younger objects since the last full one count: there may have been enough for the next already.
        gc.set_threshold(*_DURING_A_STEP, gc.get_count()[2] + _RUNS_DURING_A_STEP)
    _before.append(before)
    try:
        yield
    finally:
        before = _before.pop()
        if not _before:
            if gc.isenabled() and before[0]:
                # Without a run, a full one that is due would be made now, and delay the end of the step. A trainer
                # that does little between its steps reaches no threshold there, so one end in 20 makes a full run.
                gc.collect(1 if next(_ends) % _STEPS_BETWEEN_FULL_RUNS else 2)
            gc.set_threshold(*before)
