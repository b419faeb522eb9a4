"""The router's list of engines: each engine that serves is on it, and each lost engine is removed.

Invariants:

- No engine is added while a trainer has the engines' memory: the router requests `/health` from a new engine, which
  may generate a token there.
- An engine that is added has the newest weights, and the newest version of each adapter. One that fails to load newer
  ones samples nothing more: it is removed and restarted.
- Once `load_adapter` has returned, no engine samples with the adapter's version before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from rollout_backend.config import ServingConfig
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.serving.adapters import Adapter, load_on_engine, unload_from_engine
from rollout_backend.serving.engine import (
    Engine,
    MakeEngine,
    ReservingEngine,
    abort_generation,
    is_responding,
    pause_generation,
    resume_generation,
)
from rollout_backend.serving.supervisor import OnEvent, Probing, RestartLimits, Supervisor, first_of
from rollout_backend.serving.weights import Weights, load_weights

log = logging.getLogger(__name__)

_FOREVER_S = 10 * 365 * 86_400.0


class EngineRouter(Protocol):
    """A `Router`, or an `EngineDirectory`."""

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> bool: ...

    async def start(self) -> None: ...

    async def wait(self) -> str: ...

    async def stop(self) -> None: ...

    async def alive(self) -> bool: ...

    async def add(self, url: str) -> None: ...

    async def remove(self, url: str) -> None: ...


class EngineRouting:
    """The router, and the engines that it sends requests to: those of `engines` that serve."""

    def __init__(
        self,
        router: EngineRouter,
        serving: ServingConfig,
        newest: Weights | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """`newest`: the weights that every engine loads before it is added; None: those that it starts with.
        `adapters`: the adapters that it loads too, by name.
        """
        self.router = router
        self.engine = serving.engine
        self.engines: list[EngineSupervisor] = []
        self.newest = newest
        self.adapters = dict(adapters or {})
        self._serving = serving
        self._pauses = serving.engine == "sglang" or serving.kind != "external"
        self._awake = asyncio.Event()
        self._awake.set()
        self._changing = asyncio.Lock()  # held while engines are added and while the router is restarted

    @property
    def asleep(self) -> bool:
        return not self._awake.is_set()

    async def add(self, engine: EngineSupervisor) -> None:
        """Add an engine that has started, once the engines are awake. The caller then marks it as serving.

        Raises:
            StartupError: the engine did not load the newest weights or adapters, or the router runs and does not
                accept it.
        """
        while True:
            await self._awake.wait()
            try:
                if self.newest is not None and engine.weights != self.newest:
                    await self._load(engine, self.newest)
                await self._load_adapters(engine)
            except ServingError as error:
                raise StartupError(f"{engine.name}: {error}. {await engine.log_tail()}") from None
            async with self._changing:
                if self.asleep or engine.weights != self.newest or engine.adapters != self.adapters:
                    continue
                try:
                    await self.router.add(engine.url)
                except StartupError:
                    if self.router.running:
                        raise
                    # The router has just ended. Its restart adds every engine that serves.
                return

    async def remove(self, url: str) -> None:
        """Remove a lost engine."""
        try:
            await self.router.remove(url)
        except StartupError as error:
            # A router that ended has lost its list anyway. A slow one finds out by its health checks.
            log.warning("the engine %s ended, and the router did not remove it: %s", url, error)

    async def start_router(self) -> None:
        """Start or restart the router and add every engine that serves.

        Raises:
            StartupError: the router did not start, or ended while the engines were added.
        """
        async with self._changing:
            await self.router.stop()
            await self.router.start()
            if not self.asleep:
                await self._add_all()

    async def sleep(self) -> None:
        """End all generation; return once every engine is idle.

        A vLLM server that something else runs is not paused: it aborts its requests itself when its memory is
        released, and holds new ones.
        """
        await self._hold()
        if not self._pauses:
            return
        for engine, failure in (
            await _on_each(self.engines, lambda engine: pause_generation(engine.url, self.engine))
        ).items():
            log.error("the server %s may die when its memory is released: %s", engine.url, failure)

    async def wake(self) -> None:
        """Resume generation, and add every engine that serves."""
        if self._pauses:
            for engine, failure in (
                await _on_each(self.engines, lambda engine: resume_generation(engine.url, self.engine))
            ).items():
                log.warning("the server %s: %s", engine.url, failure)
        await self._release()

    async def update(self, weights: Weights, commit: Callable[[], None]) -> Mapping[str, str]:
        """Make these weights the newest, and return the reason of each engine that did not load them.

        Calls in flight are aborted with their tokens, new ones wait in the engines. If an engine loaded the weights,
        `commit` is called before it samples with them. If none did, the previous weights remain the newest.
        """
        await self._hold()
        engines = {supervisor: supervisor.engine for supervisor in self.engines if supervisor.serving}
        failed = dict.fromkeys(engines, "the update was interrupted")

        async def replace(engine: EngineSupervisor) -> None:
            await self._pause(engine)
            await self._load(engine, weights)

        try:
            not_loaded = await _on_each(engines, replace)
            if len(not_loaded) < len(engines) or not engines:
                commit()
                self.newest = weights
            loaded = [engine for engine in engines if engine not in not_loaded]
            failed = not_loaded | await _on_each(loaded, self._resume)
        finally:
            await self._give_up_on(engines, failed, f"version {weights.version} of the weights")
            await self._release()
        return {engine.name: why for engine, why in failed.items()}

    async def load_adapter(
        self, adapter: Adapter, commit: Callable[[], None], announce: Callable[[], Awaitable[None]]
    ) -> Mapping[str, str]:
        """Make this version of an adapter the newest, and return the reason of each engine that did not load it.

        The engines sample while they load it. If one of them loaded it, `commit` is called, then `announce`, which
        has model calls name this version from now on. Then each engine pauses, aborts its calls in flight with their
        tokens, and unloads the version before. If none loaded it, nothing changes.
        """
        await self._hold()
        engines = {supervisor: supervisor.engine for supervisor in self.engines if supervisor.serving}
        failed = dict.fromkeys(engines, "the update was interrupted")
        before = self.adapters.get(adapter.name)

        async def load(engine: EngineSupervisor) -> None:
            await load_on_engine(engine.url, adapter, self.engine)

        async def switch(engine: EngineSupervisor) -> None:
            if before is not None:
                await abort_generation(engine.url, self.engine)
                await unload_from_engine(engine.url, before, self.engine)
                await self._resume(engine)

        try:
            not_loaded = await _on_each(engines, load)
            if engines and len(not_loaded) == len(engines):
                failed = {}
                return {engine.name: why for engine, why in not_loaded.items()}
            commit()
            self.adapters[adapter.name] = adapter
            await announce()
            loaded = [engine for engine in engines if engine not in not_loaded]
            for engine in loaded:
                engine.adapters[adapter.name] = adapter
            failed = not_loaded | await _on_each(loaded, switch)
        finally:
            await self._give_up_on(engines, failed, f"the adapter {adapter.engine_name}")
            await self._release()
        return {engine.name: why for engine, why in failed.items()}

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter that no call names any more."""
        await self._hold()
        try:
            before = self.adapters.pop(name)
            engines = [engine for engine in self.engines if engine.serving]
            for engine in engines:
                engine.adapters.pop(name, None)
            failed = await _on_each(engines, lambda engine: unload_from_engine(engine.url, before, self.engine))
            for engine, why in failed.items():
                log.warning("%s keeps memory for the adapter %s: %s", engine.name, before.engine_name, why)
        finally:
            await self._release()

    async def _give_up_on(
        self, engines: Mapping[EngineSupervisor, Engine], failed: Mapping[EngineSupervisor, str], what: str
    ) -> None:
        """Remove the engines that failed to load something, and have them restarted."""
        for supervisor, why in failed.items():
            await self.remove(engines[supervisor].url)
            supervisor.give_up_on(engines[supervisor], f"{what}: {why}")

    async def _pause(self, engine: EngineSupervisor) -> None:
        await pause_generation(engine.url, self.engine)

    async def _resume(self, engine: EngineSupervisor) -> None:
        await resume_generation(engine.url, self.engine)

    async def _load(self, engine: EngineSupervisor, weights: Weights) -> None:
        """Raise ServingError if the engine does not load the weights."""
        await load_weights(engine.url, weights, self._serving)
        engine.weights = weights

    async def _load_adapters(self, engine: EngineSupervisor) -> None:
        """Make an engine that gets no calls yet load the adapters. Raise ServingError if it does not."""
        for name, adapter in [*engine.adapters.items()]:
            if self.adapters.get(name) != adapter:
                await unload_from_engine(engine.url, adapter, self.engine)
                del engine.adapters[name]
        for name, adapter in [*self.adapters.items()]:
            if name not in engine.adapters:
                await load_on_engine(engine.url, adapter, self.engine)
                engine.adapters[name] = adapter

    async def _hold(self) -> None:
        self._awake.clear()
        async with self._changing:  # an addition in progress requests /health
            pass

    async def _release(self) -> None:
        self._awake.set()
        async with self._changing:
            try:
                await self._add_all()
            except StartupError as error:
                log.info("the engines are added when the router has restarted: %s", error)

    async def _add_all(self) -> None:
        """Add every engine that serves. Mark an engine that the router does not accept as refused."""

        async def add(engine: EngineSupervisor) -> None:
            try:
                await self.router.add(engine.url)
            except StartupError as error:
                if engine.serving and self.router.running:  # a lost engine is added when it has restarted
                    log.warning("%s: %s", engine.name, error)
                    engine.refused.set()

        await asyncio.gather(*(add(engine) for engine in self.engines if engine.serving))
        if not self.router.running:
            raise StartupError("the router ended while its engines were added")


async def _on_each(
    engines: Iterable[EngineSupervisor], act: Callable[[EngineSupervisor], Awaitable[None]]
) -> dict[EngineSupervisor, str]:
    """Act on the engines concurrently. Return why, for those that failed."""

    async def outcome(engine: EngineSupervisor) -> str:
        try:
            await act(engine)
        except ServingError as error:
            return str(error)
        return ""

    engines = list(engines)
    outcomes = await asyncio.gather(*map(outcome, engines))
    return {engine: why for engine, why in zip(engines, outcomes, strict=True) if why}


class RouterSupervisor(Supervisor):
    def __init__(self, routing: EngineRouting, limits: RestartLimits, on_event: OnEvent, probing: Probing) -> None:
        super().__init__("router", limits, on_event, probing)
        self._routing = routing

    async def start_server(self) -> None:
        await self._routing.start_router()

    async def wait_ended(self) -> str:
        return await self._routing.router.wait()

    async def is_responding(self) -> bool:
        return await self._routing.router.alive()


class EngineSupervisor(Supervisor):
    """Keeps one engine running, with a new `Engine` for each start."""

    def __init__(
        self,
        number: int,
        make: MakeEngine,
        routing: EngineRouting,
        limits: RestartLimits,
        on_event: OnEvent,
        probing: Probing,
    ) -> None:
        super().__init__(f"engine-{number}", limits, on_event, probing)
        self.engine: Engine = make(number)
        self.waiting_for = ""  # what the engine needs before it can start, while it waits for it
        self.weights: Weights | None = None  # those it loaded since its start
        self.adapters: dict[str, Adapter] = {}  # likewise
        self.refused = asyncio.Event()  # set if a restarted router does not accept the engine
        self._unfit = asyncio.Event()
        self._why_unfit = ""
        self._number = number
        self._make = make
        self._routing = routing
        self._probe_timeout_s = probing.timeout_s
        self._in_router = False

    @property
    def url(self) -> str:
        return self.engine.url

    async def start_server(self) -> None:
        if self.tried.is_set():
            self.engine = self._make(self._number)
        if isinstance(self.engine, ReservingEngine):
            await self._reserve(self.engine)
        await self.engine.start()
        self.weights = None
        self.adapters = {}
        self.refused.clear()
        self._unfit.clear()
        self._in_router = True
        await self._routing.add(self)

    def give_up_on(self, engine: Engine, why: str) -> None:
        """Restart, unless another engine has replaced this one meanwhile."""
        if self.engine is engine:
            self.serving = False
            self._why_unfit = why
            self._unfit.set()

    async def _reserve(self, engine: ReservingEngine) -> None:
        try:
            async for waiting_for in engine.reserve():
                self.waiting_for = waiting_for
                self.report("waiting", waiting_for)
        finally:
            self.waiting_for = ""

    async def wait_ended(self) -> str:
        return await first_of(self.engine.wait(), self._wait_unfit(), self._wait_refused())

    async def _wait_unfit(self) -> str:
        await self._unfit.wait()
        return self._why_unfit

    async def _wait_refused(self) -> str:
        """Return why the router does not accept the engine, after a second attempt."""
        while True:
            await self.refused.wait()
            self.refused.clear()
            try:
                await self._routing.add(self)
            except StartupError as error:
                return str(error)

    async def is_responding(self) -> bool:
        return self._routing.asleep or await is_responding(self.url, self._routing.engine, self._probe_timeout_s)

    async def log_tail(self) -> str:
        return await self.engine.log_tail()

    async def release(self) -> None:
        if self._in_router:
            self._in_router = False
            await self._routing.remove(self.url)
        await self.engine.stop()

    async def exhausted(self, wait_s: float) -> None:
        """Wait until a restart is allowed again. Raise StartupError if no other engine is left."""
        engines = self._routing.engines
        if all(engine.gave_up for engine in engines):
            self.report("gave_up", self.last_words)
            others = ", and no other engine is left" if len(engines) > 1 else ""
            raise StartupError(f"{self.gone}{others}: {self.last_words}")
        up = sum(engine.serving for engine in engines)
        self.report("gave_up", f"{self.gone}; {up} of {len(engines)} engines serve")
        await asyncio.sleep(min(wait_s, _FOREVER_S))
