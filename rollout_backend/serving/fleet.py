"""All engines and the router in front of them: started together, watched, mended, and stopped together.

    async with Fleet(config, log_dir, on_event) as fleet:
        ...  # fleet.router_url
        await fleet.failed()  # in a task of its own

What must always hold:

- The router sends requests to healthy engines only, and to all of them. An engine that ends, or no longer answers,
  is taken from it at once, started anew and given back; a router that ends is started again on the same port and
  given all engines.
- Whatever happens is reported as a `ServingEvent`. A server that was restarted `serving.max_restarts` times and is
  gone again ends the run, with the end of its log.
- Nothing that was started outlives the fleet, also where `start` fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import StartupError
from rollout_backend.serving.engine import Engine, ExternalEngine, LocalEngine, MakeEngine, is_healthy
from rollout_backend.serving.router import Router

log = logging.getLogger(__name__)

EventKind = Literal["started", "died", "restarted", "gave_up", "left"]


@dataclass(frozen=True)
class ServingEvent:
    """Something that happened to a server. `detail` says why, with the end of the server's log."""

    time: float  # unix seconds
    server: str  # "router", "engine-0", ...
    kind: EventKind
    detail: str = ""


@dataclass(frozen=True)
class ServerState:
    """One server as it stands. `serving`: healthy, and an engine known to the router."""

    name: str
    url: str
    serving: bool
    restarts: int


@dataclass(frozen=True)
class Probing:
    """When a server that runs counts as hung: so many probes of `/health` in a row without an answer.

    A hung scheduler behind a live HTTP server is not seen here; SGLang's own watchdog ends such a server.
    """

    interval_s: float = 5.0
    timeout_s: float = 15.0  # generous: a server whose cores are all taken is slow, not hung
    failures: int = 3


@dataclass
class _Slot:
    """What is true of one server across its restarts."""

    name: str
    restarts: int = 0
    serving: bool = False
    last_words: str = ""


@dataclass(kw_only=True)
class _EngineSlot(_Slot):
    number: int
    engine: Engine  # the one that runs, or is being started
    watch: asyncio.Task[None] | None = None


class Fleet:
    """Enter it, or `start` and `stop` it; once."""

    def __init__(
        self,
        config: RolloutConfig,
        log_dir: Path,
        on_event: Callable[[ServingEvent], None] = lambda event: None,
        *,
        make_engine: MakeEngine | None = None,
        probing: Probing | None = None,
    ) -> None:
        """`make_engine` decides what an engine is; by default `serving.kind` does."""
        self._serving = config.serving
        self._config = config
        self._log_dir = log_dir
        self._on_event = on_event
        self._make_engine = make_engine
        self._probing = probing or Probing()
        self._router = Router(config.router, log_dir / "router.log", config.timeouts.model_call_s)
        self._router_slot = _Slot("router")
        self._slots: list[_EngineSlot] = []
        self._next_number = self._count
        self._registering = asyncio.Lock()  # held while the router learns of engines, or is itself being restarted
        self._watching: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    @property
    def router_url(self) -> str:
        """The same for the whole life of the fleet, once it has started."""
        return self._router.url

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Of the engines that serve at this moment."""
        return tuple(slot.engine.url for slot in self._slots if slot.serving)

    def snapshot(self) -> tuple[ServerState, ...]:
        """The router and then the engines, as they stand."""
        router = self._router_slot
        return (
            ServerState(router.name, self._router.url, router.serving, router.restarts),
            *(ServerState(slot.name, slot.engine.url, slot.serving, slot.restarts) for slot in self._slots),
        )

    # --- start and end ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts the router and all engines at once; returns when each engine gets requests.

        Raises:
            StartupError: one of them did not come up, and why. Those that had started are stopped.
            ConfigError: the CPU engine is not installed.
        """
        starting: list[asyncio.Task[None]] = []
        try:
            if self._make_engine is None:
                self._make_engine = await self._engines_of_kind()
            make = self._make_engine
            self._slots = [_EngineSlot(f"engine-{i}", number=i, engine=make(i)) for i in range(self._count)]
            works = [self._router.start(), *(slot.engine.start() for slot in self._slots)]
            starting = [asyncio.create_task(work) for work in works]
            await asyncio.gather(*starting)
            self._router_slot.serving = True
            for slot in self._slots:
                await self._register(slot)
            for each in (self._router_slot, *self._slots):
                self._report(each, "started")
        except BaseException:
            await _cancel(starting)
            await self.stop()
            raise
        self._watch(self._mend_router())
        for slot in self._slots:
            slot.watch = self._watch(self._mend_engine(slot))

    async def follow(self, urls: Sequence[str]) -> None:
        """Serve with these engines from now on: for `serving.kind=external`, where they come and go.

        An engine that is new gets requests once it is healthy; one that is left out gets none any more.

        Raises:
            StartupError: a new one did not become healthy.
        """
        for slot in [slot for slot in self._slots if slot.engine.url not in urls]:
            self._slots.remove(slot)
            if slot.watch is not None:
                self._watching.remove(slot.watch)
                await _cancel([slot.watch])
            await self._forget(slot.engine.url)
            self._report(slot, "left")
        for url in [url for url in urls if url not in {slot.engine.url for slot in self._slots}]:
            number = self._next_number
            self._next_number += 1
            engine = ExternalEngine(f"engine-{number}", url, self._serving.startup_timeout_s)
            await engine.start()
            slot = _EngineSlot(f"engine-{number}", number=number, engine=engine)
            await self._register(slot)
            self._slots.append(slot)
            self._report(slot, "started")
            slot.watch = self._watch(self._mend_engine(slot))

    async def stop(self) -> None:
        """Ends all servers. May be called twice, and after a start that failed."""
        await _cancel(self._watching)
        self._watching.clear()
        stops = [self._router.stop(), *(slot.engine.stop() for slot in self._slots)]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for slot in (self._router_slot, *self._slots):
            slot.serving = False
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def failed(self) -> NoReturn:
        """Waits until the fleet cannot be mended any more.

        Raises:
            StartupError: a server is gone for good; the message carries the end of its log.
        """
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    @property
    def _count(self) -> int:
        return len(self._serving.urls) if self._serving.kind == "external" else self._serving.servers

    async def _engines_of_kind(self) -> MakeEngine:
        config, serving = self._config, self._serving
        match serving.kind:
            case "external":
                return lambda i: ExternalEngine(f"engine-{i}", serving.urls[i], serving.startup_timeout_s)
            case "ray":
                from rollout_backend.serving.ray_fleet import ray_engines  # ray is slow to import

                return await ray_engines(config.model, serving, self._log_dir)
            case "process":
                return lambda i: LocalEngine(
                    f"engine-{i}",
                    config.model,
                    serving,
                    self._log_dir / f"engine-{i}.log",
                    first_gpu=i * serving.tensor_parallel,
                )

    # --- watching -----------------------------------------------------------------------------------------

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._watch_ended)
        self._watching.append(task)
        return task

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        # Watching goes on for ever, so it ends because a server is given up, because of `stop`, or by a bug.
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._failed.set()

    async def _mend_engine(self, slot: _EngineSlot) -> NoReturn:
        while True:
            assert slot.engine is not None
            engine = slot.engine
            why = await self._end_of(
                engine.wait(), functools.partial(is_healthy, engine.url, self._probing.timeout_s)
            )
            self._report(slot, "died", why or f"did not answer any more. {await engine.tail()}")
            await self._forget(engine.url)
            await engine.stop()
            while not slot.serving:
                self._count_restart(slot)
                slot.engine = self._engine_again(slot)
                try:
                    await slot.engine.start()
                    await self._register(slot)
                except StartupError as error:
                    self._report(slot, "died", str(error))
                    await slot.engine.stop()
            self._report(slot, "restarted")

    def _engine_again(self, slot: _EngineSlot) -> Engine:
        if self._serving.kind == "external":  # it may be one that `follow` brought
            return ExternalEngine(slot.name, slot.engine.url, self._serving.startup_timeout_s)
        assert self._make_engine is not None
        return self._make_engine(slot.number)

    async def _mend_router(self) -> NoReturn:
        slot = self._router_slot
        while True:
            why = await self._end_of(self._router.wait(), self._router.alive)
            self._report(slot, "died", why or "did not answer any more")
            while not slot.serving:
                self._count_restart(slot)
                try:
                    async with self._registering:
                        await self._router.stop()
                        await self._router.start()
                        await self._register_all()
                        slot.serving = True
                except StartupError as error:
                    self._report(slot, "died", str(error))
            self._report(slot, "restarted")

    async def _end_of(self, ending: Coroutine[Any, Any, str], probe: Callable[[], Awaitable[bool]]) -> str | None:
        """Waits until a server ended, and returns how, or no longer answers: None."""
        ended = asyncio.create_task(ending)
        hung = asyncio.create_task(self._hangs(probe))
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            await _cancel([ended, hung])

    async def _hangs(self, probe: Callable[[], Awaitable[bool]]) -> None:
        failures = 0
        while failures < self._probing.failures:
            await asyncio.sleep(self._probing.interval_s)
            failures = 0 if await probe() else failures + 1

    # --- what the router knows ----------------------------------------------------------------------------

    async def _register(self, slot: _EngineSlot) -> None:
        async with self._registering:
            slot.serving = True
            try:
                await self._router.add(slot.engine.url)
            except StartupError:
                if self._watching and not self._router.running:
                    return  # the router has just ended: it gets every engine that serves when it is restarted
                slot.serving = False
                raise

    async def _register_all(self) -> None:
        for slot in self._slots:
            if not slot.serving:
                continue
            try:
                await self._router.add(slot.engine.url)
            except StartupError:
                if slot.serving:  # else it ended meanwhile, and registers when it is back
                    raise

    async def _forget(self, url: str) -> None:
        try:
            await self._router.remove(url)
        except StartupError as error:
            # A router that ended has forgotten it anyway; one that is merely slow finds out by its health checks.
            log.warning("the engine %s ended, and the router could not be told: %s", url, error)

    # --- accounts -----------------------------------------------------------------------------------------

    def _count_restart(self, slot: _Slot) -> None:
        if slot.restarts >= self._serving.max_restarts:
            self._report(slot, "gave_up", slot.last_words)
            raise StartupError(
                f"{slot.name} is gone after {slot.restarts} restarts (serving.max_restarts): {slot.last_words}"
            )
        slot.restarts += 1

    def _report(self, slot: _Slot, kind: EventKind, detail: str = "") -> None:
        if kind == "died":
            slot.serving = False
            slot.last_words = detail
        self._on_event(ServingEvent(time.time(), slot.name, kind, detail))


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
