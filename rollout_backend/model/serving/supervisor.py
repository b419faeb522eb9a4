"""Keep servers running: start each one, watch it, and restart it within its budget.

Invariants:

- Every change is reported as a `ServingEvent`.
- Resources that a lost server still holds are released before its restart.
- The second restart in a row waits for 10 s, and the third for 20 s: the cause of failed starts, such as a lack of
  memory, may last longer than the starts take. A server that has never served does not wait: the cause is more likely
  a wrong setting.
- Supervision ends when the budget is exhausted, on a bug, and always on a cancellation.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from rollout_backend.errors import StartupError
from rollout_backend.model.serving.server_process import ServerKilled

_PAUSE_S = 10.0
_T = TypeVar("_T")

EventKind = Literal["waiting", "started", "died", "restarted", "gave_up", "left"]


@dataclass(frozen=True)
class ServingEvent:
    """A change in a server's state.

    `time` is in unix seconds. `server` is "router", "engine-0" or "gateway", for example. `detail` gives the reason,
    with the end of the server's log.
    """

    time: float
    server: str
    kind: EventKind
    detail: str = ""


OnEvent = Callable[[ServingEvent], None]


@dataclass(frozen=True)
class Probing:
    """A server counts as hung after this many consecutive probes without an answer.

    Every `sample_every_s`, the probe of an engine also makes it sample a token: its scheduler or GPU may hang behind
    a live HTTP server.
    """

    interval_s: float = 5.0
    timeout_s: float = 15.0
    """Generous, because a server whose cores are all busy is slow, not hung."""
    failures: int = 3
    sample_every_s: float = 60.0


@dataclass(frozen=True)
class RestartLimits:
    max_restarts: int
    window_s: float

    def __str__(self) -> str:
        within = f" within {self.window_s:g} s" if self.max_restarts else ""
        return f"{self.max_restarts} restarts{within} (serving.max_restarts)"


class RestartBudget:
    """The restarts of one server. A restart counts for `limits.window_s` seconds."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._at: deque[float] = deque(maxlen=limits.max_restarts)

    def wait_s(self) -> float:
        """Return the seconds until the next restart is allowed: 0 if now, infinity if never."""
        if len(self._at) < self._limits.max_restarts:
            return 0.0
        return max(0.0, self._at[0] + self._limits.window_s - _now()) if self._at else float("inf")

    def spend(self) -> None:
        """Count a restart at this time."""
        self._at.append(_now())

    def clear(self) -> None:
        """Forget all restarts."""
        self._at.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()


class Supervisor(ABC):
    """Keeps one server running. A subclass defines how to start, watch and release the server."""

    def __init__(self, name: str, limits: RestartLimits, on_event: OnEvent, probing: Probing | None = None) -> None:
        """Without `probing`, a server counts as lost only when it has ended."""
        self.name = name
        self.serving = False
        self.has_served = False
        self.restarts = 0
        self.gave_up = False
        # Set once the first start has succeeded or failed.
        self.tried = asyncio.Event()
        # Why the server was last lost.
        self.last_words = ""
        self.gone = f"{name} is gone after {limits}"
        self.budget = RestartBudget(limits)
        self._on_event = on_event
        self._probing = probing

    # --- what a subclass defines ------------------------------------------------------------------------------

    @abstractmethod
    async def start_server(self) -> None:
        """Start or restart the server, and return once it serves. Raises StartupError on failure."""

    @abstractmethod
    async def wait_ended(self) -> str:
        """Wait until the server has ended, and return how."""

    async def is_responding(self) -> bool:
        """Return whether the server answers a probe."""
        return True

    async def log_tail(self) -> str:
        """Return the end of the server's log, for an error message."""
        return ""

    async def release(self) -> None:
        """Free resources that a lost server still holds. By default, does nothing."""
        return

    async def exhausted(self, wait_s: float) -> None:
        """Handle an exhausted budget: raise StartupError, or return once a restart is allowed, in `wait_s`."""
        self.report("gave_up", self.last_words)
        raise StartupError(f"{self.gone}: {self.last_words}")

    # --- supervision ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server for the first time, before `run`, without reporting it. If it is killed before it is up,
        restart it within the budget, and report that.

        Raises:
            StartupError: the server did not start, or was killed and the budget is exhausted.
        """
        while True:
            try:
                await self.start_server()
                break
            except ServerKilled as error:
                if self.budget.wait_s():
                    raise
                self._lost(str(error))
                await self.release()
                self.budget.spend()
                self.restarts += 1
        self.serving = self.has_served = True
        self.tried.set()
        if self.restarts:
            self.report("restarted")

    async def run(self) -> NoReturn:
        """Start the server, unless `start` has, and restart it whenever it is lost.

        Raises:
            StartupError: the budget is exhausted.
        """
        if not self.tried.is_set():
            await self._attempt("started")
        pause_s = 0.0
        while True:
            if self.serving:
                self._lost(await self._wait_lost())
                pause_s = 0.0
            await self.release()
            if wait_s := self.budget.wait_s():
                self.gave_up = True
                await self.exhausted(wait_s)
                self.gave_up = False
            if self.has_served:
                await asyncio.sleep(pause_s)
                pause_s += _PAUSE_S
            self.budget.spend()
            self.restarts += 1
            await self._attempt("restarted")

    def report(self, kind: EventKind, detail: str = "") -> None:
        self._on_event(ServingEvent(time.time(), self.name, kind, detail))

    async def _attempt(self, kind: EventKind) -> None:
        try:
            await self.start_server()
        except (StartupError, OSError) as error:
            # A full disk, or a lack of file descriptors, raises OSError.
            self._lost(str(error))
        else:
            self.serving = self.has_served = True
            self.report(kind)
        self.tried.set()

    def _lost(self, why: str) -> None:
        self.serving = False
        self.last_words = why
        self.report("died", why)

    async def _wait_lost(self) -> str:
        if self._probing is None:
            return await self.wait_ended()
        return await first_of(self.wait_ended(), self._wait_hung(self._probing))

    async def _wait_hung(self, probing: Probing) -> str:
        failures = 0
        while failures < probing.failures:
            await asyncio.sleep(probing.interval_s)
            failures = 0 if await self.is_responding() else failures + 1
        return f"did not answer any more. {await self.log_tail()}"


class SupervisorGroup:
    """The supervisors of a fleet, each in a task. The first failure ends the fleet."""

    def __init__(self) -> None:
        self._tasks: dict[Supervisor, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    def add(self, supervisor: Supervisor) -> None:
        task = asyncio.create_task(supervisor.run())
        task.add_done_callback(self._on_end)
        self._tasks[supervisor] = task

    async def remove(self, supervisor: Supervisor) -> None:
        await cancel_all([self._tasks.pop(supervisor)])

    async def stop(self) -> None:
        """End all supervision. The servers keep running."""
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        await cancel_all(tasks)

    async def run_until(self, reached: Coroutine[Any, Any, object]) -> None:
        """Return once `reached` has returned or the fleet has failed. Raises a failure caused by a bug."""
        await first_of(reached, self._failed.wait())
        if self._failure is not None and not isinstance(self._failure, StartupError):
            raise self._failure

    async def failed(self) -> NoReturn:
        """Wait until a supervisor has failed, and raise its error."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._failed.set()


async def first_of(*coroutines: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of the coroutine that ends first, earlier arguments first, and cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
