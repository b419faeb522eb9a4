"""Work on the records of a run in several processes, in order and with bounded memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import TypeVar

CHUNK = 64
"""Records in one piece of work."""
MIN_ROLLOUTS = 1024
"""With fewer rollouts, this process finishes before others have started."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def map_in_order(work: Callable[[_In], _Out], pieces: Iterable[_In], rollouts: int) -> Iterator[_Out]:
    """Yield `work(piece)` for each piece, in one process per core if the run has many rollouts.

    `work` and its arguments must be picklable. At most two pieces per process are in flight.
    """
    processes = len(os.sched_getaffinity(0)) if rollouts >= MIN_ROLLOUTS else 1
    if processes == 1:
        yield from map(work, pieces)
        return
    waiting, left = deque[Future[_Out]](), iter(pieces)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            for piece in left:
                waiting.append(pool.submit(work, piece))
                if len(waiting) == 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def chunks(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield lists of `CHUNK` lines."""
    left = iter(lines)
    while chunk := list(islice(left, CHUNK)):
        yield chunk
