"""Call disks from threads, because a network file system can stop answering for minutes.

Invariants:

- The event loop never waits for a disk. Callers wait for a limited time, and not again while the disk hangs.
- A thread that hangs does not hold up the end of the process, as a thread of asyncio's executor would.
"""

import asyncio
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from agent_wrapper.shared.threads import in_thread
from rollout_backend.base.logs import report_failure

log = logging.getLogger(__name__)

DISK_S = 60.0

_T = TypeVar("_T")
_P = ParamSpec("_P")


async def call_disk(work: Callable[[], _T], limit_s: float | None = None) -> _T:
    """Return the result of `work`, which runs in a new thread.

    Raises:
        TimeoutError, an OSError: it took longer than `limit_s`, by default `DISK_S`. It may still complete.
    """
    try:
        async with asyncio.timeout(DISK_S if limit_s is None else limit_s):
            return await in_thread(work, "disk")
    except TimeoutError as error:
        raise _no_answer() if error.errno is None else error from None


class Disk:
    """A thread that makes the calls to one folder's disk, in their order."""

    def __init__(
        self,
        folder: Path,
        limit_s: float | None = None,
        cost: str = "files of this run are missing or old until it does. S3 has the results",
    ) -> None:
        """The thread starts with the first call. Callers wait for at most `limit_s`, by default `DISK_S`. `cost` says
        what a disk that does not answer costs."""
        self._folder = folder
        self._given_limit_s = limit_s
        self._cost = cost
        self.hangs = False
        """Whether a caller has given up waiting. The next answer of the disk resets it."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def _limit_s(self) -> float:
        return DISK_S if self._given_limit_s is None else self._given_limit_s

    def submit(self, call: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> Future[_T]:
        """Make a call without waiting for it. Its error is logged."""
        done = self.enqueue(call, *args, **more)
        done.add_done_callback(report_failure(f"a call of the disk of {self._folder}"))
        return done

    async def call(self, call: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
        """Make a call, and return its result or raise its error.

        Raises:
            TimeoutError, an OSError: the disk hangs. The call may still complete.
        """
        done = self.enqueue(call, *args, **more)
        if not await self.wait(done):
            raise _no_answer()
        return done.result()

    async def wait(self, *calls: Future[Any]) -> bool:
        """Wait for submitted calls. Return False if the disk hangs. The calls may still complete."""
        left = [] if self.hangs else [asyncio.wrap_future(call) for call in calls if not call.done()]
        for each in left:
            # The caller has the error, or `submit` has logged it.
            each.add_done_callback(lambda done: done.cancelled() or done.exception())
        if left and (await asyncio.wait(left, timeout=self._limit_s))[1]:
            self._report_hang()
        return all(call.done() for call in calls)

    def close(self) -> None:
        """Wait for all calls, and end the thread. Another call starts it again."""
        try:
            self.enqueue(lambda: None).result(0.0 if self.hangs else self._limit_s)
        except TimeoutError:
            self._report_hang()
        self._calls.put(None)

    def _report_hang(self) -> None:
        self.hangs = True
        log.warning(
            "%s has not answered for %g s: %s; look at the disk or the network file system",
            self._folder,
            self._limit_s,
            self._cost,
        )

    def enqueue(self, call: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> Future[_T]:
        """Make a call without waiting for it. Its result or error is in the future only."""
        done: Future[_T] = Future()

        def make() -> None:
            try:
                done.set_result(call(*args, **more))
            except BaseException as error:
                done.set_exception(error)

        with self._starting:
            self._calls.put(make)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
                self._thread.start()
        return done

    def _run(self) -> None:
        while True:
            if (call := self._calls.get()) is not None:
                call()
                self.hangs = False
                continue
            with self._starting:
                if self._calls.empty():
                    self._thread = None
                    return


def _no_answer() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
