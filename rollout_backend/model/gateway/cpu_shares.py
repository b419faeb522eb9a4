"""Share the CPU time of a gateway process among its sessions: every unit of work is charged to one of them.

Invariants:

- Long work runs in threads, one unit of a session at a time. The session that has used the least recently goes first,
  also between the pieces of a long text that another session has encoded.
- A session that has used more than its share waits before its next unit. Its share is half of an equal part of one
  core, at least `_MIN_RATE`, and it may use `_BURST_S` at once. Among many sessions, one therefore delays fewer than
  one call in a hundred of the others.
- Only a part of brief work is charged; the part is larger while the event loop is busy. Sessions that share a busy
  event loop equally never wait.
- Garbage collection is charged to no session, because it visits the objects of all sessions.
- A session never waits for longer than `_MAX_PAUSE_S` at a time, and a unit that has started is completed. A session
  whose units each take more than a hundredth of `_MAX_PAUSE_S` therefore exceeds its share.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar, cast

from rollout_backend.base.garbage_collection import own_thread_s
from rollout_backend.base.giving_way import giving_way
from rollout_backend.base.logs import report_failure

_T = TypeVar("_T")
_BURST_S, _MAX_PAUSE_S = 0.5, 30.0
_PART, _MIN_RATE = 0.5, 0.005
# A unit of up to `_BRIEF_S` hardly delays other sessions, so a tenth of it is charged. Once the event loop is busy
# for more than `_BUSY` of the time, many brief units delay everyone, so more is charged: less than `_PART`, so that
# equal sessions never wait.
_BRIEF_S, _BRIEF_WEIGHT, _BUSY_WEIGHT = 0.002, 0.1, 0.4
_BUSY, _LOOK_S = 0.7, 0.25
# CPU time that the server and its framework take for a model call, and for any other request. Agents need few other
# requests, so these are charged in full.
_CALL_S, _REQUEST_S = 0.0005, 0.001


class Worker:
    """A thread that serves the session with the lowest recent use first."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._numbers = itertools.count()
        self._jobs: list[tuple[float, int, Future[Any], Callable[[], Any]]] = []
        # Only the event loop writes the first, and only the thread the second.
        self._submitted = self._finished = 0
        self.lent_s = 0.0
        """CPU time of units that ran during a unit of another session, which gave way to them."""

    @property
    def is_busy(self) -> bool:
        return self._submitted != self._finished

    def submit(self, used_s: float, function: Callable[[], _T]) -> Future[_T]:
        job: Future[_T] = Future()
        self._submitted += 1
        heapq.heappush(self._jobs, (used_s, next(self._numbers), job, function))
        self._thread.submit(self._run_next).add_done_callback(report_failure("a session's CPU work"))
        return job

    def _run_next(self) -> None:
        # An earlier unit may have let this one go first.
        if self._jobs:
            used_s = self._jobs[0][0]
            with giving_way(partial(self._give_way, used_s, own_thread_s())):
                self._run_first()

    def _give_way(self, used_s: float, began_s: float) -> None:
        """Run the waiting units of sessions that have used less CPU time than the current unit's session. When the
        current unit started, its session had used `used_s` and the thread had used `began_s`."""
        while self._jobs and self._jobs[0][0] < used_s + own_thread_s() - began_s:
            lent_from_s = own_thread_s()
            with giving_way(None):
                self._run_first()
            lent_s = own_thread_s() - lent_from_s
            self.lent_s += lent_s
            began_s += lent_s

    def _run_first(self) -> None:
        *_, job, function = heapq.heappop(self._jobs)
        cancelled = not job.set_running_or_notify_cancel()
        error: BaseException | None = None
        if not cancelled:
            try:
                result = function()
            except BaseException as raised:
                error = raised
        # Mark the thread as free before the event loop gets the result.
        self._finished += 1
        if error is not None:
            job.set_exception(error)
        elif not cancelled:
            job.set_result(result)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class CpuShares:
    """The threads of one process and the rate at which a session may use CPU time."""

    def __init__(
        self,
        sessions: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`sessions` returns the number of sessions."""
        self._sessions = sessions
        self.clock, self.sleep = clock, sleep
        # A tokenizer serves one thread at a time.
        self.tokenizer, self.other = Worker("renderer"), Worker("parser")
        self._looked_at, self._loop_s, self._is_busy = clock(), time.thread_time(), False

    @property
    def rate(self) -> float:
        """Return the part of a core that a session may use."""
        return max(_MIN_RATE, _PART / max(1, self._sessions()))

    def brief_weight(self) -> float:
        """Return the part of a brief unit's time that counts. Only the event loop calls this."""
        now = self.clock()
        if (passed_s := now - self._looked_at) >= _LOOK_S:
            loop_s = time.thread_time()
            self._is_busy = loop_s - self._loop_s > _BUSY * passed_s
            self._looked_at, self._loop_s = now, loop_s
        return _BUSY_WEIGHT if self._is_busy else _BRIEF_WEIGHT

    def close(self) -> None:
        self.tokenizer.close()
        self.other.close()


class CpuShare:
    """The CPU time of one session."""

    def __init__(self, cpu: CpuShares) -> None:
        self._cpu = cpu
        self._used_s, self._at = 0.0, cpu.clock()
        # Charged since `_at`, and not in `_used_s` yet.
        self._new_s = 0.0
        self._turn, self._entry = asyncio.Lock(), asyncio.Lock()

    @property
    def used_s(self) -> float:
        """Return the recent use in seconds. It decreases with time, at the rate of the session's share."""
        return self._settle()

    def _settle(self) -> float:
        now = self._cpu.clock()
        if self._used_s:
            self._used_s = max(0.0, self._used_s - self._cpu.rate * (now - self._at))
        self._used_s += self._new_s
        self._new_s, self._at = 0.0, now
        return self._used_s

    @property
    def _must_pay(self) -> bool:
        # Mostly false without a look at the clock.
        return self._used_s + self._new_s > _BURST_S and self._settle() > _BURST_S

    def charge(self, seconds: float) -> None:
        self._new_s += seconds if seconds > _BRIEF_S else self._cpu.brief_weight() * seconds
        # The pieces of a streamed reply are charged one by one.
        if self._new_s > _BRIEF_S:
            self._settle()

    async def enter(self, *, is_call: bool = False) -> None:
        """Begin a request: wait until the session has paid for its earlier work."""
        if self._entry.locked() or self._must_pay:
            async with self._entry:
                await self._pay()
        if is_call:
            self.charge(_CALL_S)
        else:
            self._new_s += _REQUEST_S

    def may_connect(self) -> bool:
        """Return whether the session owes nothing, and charge it for a connection that need not wait."""
        if self._must_pay:
            return False
        self._new_s += _REQUEST_S
        return True

    async def pace(self, limit_s: float = _MAX_PAUSE_S) -> None:
        """Charge a request that is not counted, and wait until the session has paid for earlier ones, for at most
        `limit_s`. Such requests do not wait for each other."""
        self._used_s = self.used_s + _REQUEST_S
        await self._pay(limit_s)

    async def _pay(self, limit_s: float = _MAX_PAUSE_S) -> None:
        if (excess := self.used_s - _BURST_S) > 0:
            await self._cpu.sleep(min(excess / self._cpu.rate, limit_s))

    def is_free(self) -> bool:
        """Return whether the event loop may do brief work with the tokenizer for this session now."""
        return not (self._turn.locked() or self._cpu.tokenizer.is_busy or self._must_pay)

    async def run(self, function: Callable[..., _T], *args: Any, brief: bool = False, tokenizes: bool = True) -> _T:
        """Return `function(*args)`. Brief work runs on the event loop if the session and the thread are free.

        A caller that is cancelled does not stop work that has begun, so the session's other work still waits for it.
        """
        worker = self._cpu.tokenizer if tokenizes else self._cpu.other
        if brief and not (self._turn.locked() or worker.is_busy or self._must_pay):
            return function(*args)
        spent_s = 0.0

        def timed() -> _T:
            nonlocal spent_s
            began_s = own_thread_s() - worker.lent_s
            try:
                return function(*args)
            finally:
                spent_s = own_thread_s() - worker.lent_s - began_s

        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_T] = loop.create_future()

        def finished(job: Future[_T]) -> None:
            self.charge(spent_s)
            self._turn.release()
            if outcome.cancelled():
                return
            if (error := job.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(job.result())

        await self._turn.acquire()
        try:
            await self._pay()
            job = worker.submit(self.used_s, timed)
        except BaseException:
            self._turn.release()
            raise
        outcome.add_done_callback(lambda _: outcome.cancelled() and job.cancel())
        # The thread wakes the event loop once, which takes as long as brief work.
        job.add_done_callback(lambda job: loop.is_closed() or loop.call_soon_threadsafe(finished, job))
        return await outcome


# --- work on the event loop -----------------------------------------------------------------------------------

_current: ContextVar[CpuShare | None] = ContextVar("cpu_share", default=None)


async def charge_to(share: CpuShare, work: Coroutine[Any, Any, _T]) -> _T:
    """Await the work, and charge its time on the event loop to the session, including tasks of `charged_task`."""
    token = _current.set(share)
    try:
        return await _Metered(work, share)
    finally:
        _current.reset(token)


def charged_task(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Start a task that is charged to the caller's session."""
    share = _current.get()
    return asyncio.create_task(work if share is None else charge_to(share, work))


class _Metered(Generic[_T]):
    """A coroutine whose steps are charged to a session."""

    def __init__(self, work: Coroutine[Any, Any, _T], share: CpuShare) -> None:
        self._work, self._share = work, share

    def __await__(self) -> Generator[Any, Any, _T]:
        work, share = self._work, self._share
        step: Callable[[], Any] = partial(work.send, None)
        while True:
            began = own_thread_s()
            try:
                waits_for = step()
            except StopIteration as result:
                return cast(_T, result.value)
            finally:
                share.charge(own_thread_s() - began)
            try:
                yield waits_for
            except BaseException as error:
                step = partial(work.throw, error)
            else:
                step = partial(work.send, None)
