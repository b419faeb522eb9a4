"""Keep the router's list of engines: engines that serve are on it, and lost engines are removed.

Invariants:

- No engine is added while the engines are paused, because a trainer may have their memory: the router requests
  `/health` from a new engine, which may generate a token there.
- An added engine has the newest weights and the newest version of each adapter. An engine that fails to load newer
  ones is removed and restarted before it samples again.
- Once `load_adapter` has returned, no new model call names an earlier version of the adapter. SGLang 0.5.23 loads an
  unloaded version again for a call that was under way; its tokens carry the version that it names.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rollout_backend.config import ServingConfig
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.model.serving.adapters import Adapter, load_on_engine, unload_from_engine
from rollout_backend.model.serving.engine import Engine, pause_generation, resume_generation
from rollout_backend.model.serving.router import EngineDirectory, Router
from rollout_backend.model.serving.weights import Weights, load_weights

log = logging.getLogger(__name__)

EngineRouter = Router | EngineDirectory
_T = TypeVar("_T")


@dataclass(eq=False)
class RoutedEngine:
    """A started engine, and the weights and adapters that it has loaded since."""

    name: str
    server: Engine
    weights: Weights | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)
    _unfit: asyncio.Event = field(default_factory=asyncio.Event)
    _why: str = ""

    @property
    def url(self) -> str:
        return self.server.url

    def restart(self, why: str) -> None:
        """Have the engine's supervisor restart it."""
        self._why = why
        self._unfit.set()

    async def wait_unfit(self) -> str:
        """Wait until the engine must be restarted, and return why."""
        await self._unfit.wait()
        return self._why


class EngineRouting:
    """The router, and the `engines` to which it sends requests."""

    def __init__(
        self,
        router: EngineRouter,
        serving: ServingConfig,
        newest: Weights | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """`newest` are the weights that every engine loads before it is added, or None for those that it starts with.
        `adapters` are the adapters that it also loads, by name."""
        self.router = router
        self.engine = serving.engine
        self.engines: list[RoutedEngine] = []
        self.newest = newest
        self.adapters = dict(adapters or {})
        self._serving = serving
        self._pauses = serving.engine == "sglang" or serving.kind != "external"
        self._resumed = asyncio.Event()
        self._resumed.set()
        # Held while engines are added and while the router restarts.
        self._changing = asyncio.Lock()

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    async def add(self, engine: RoutedEngine) -> None:
        """Add a started engine, once the engines are not paused.

        Raises:
            StartupError: the engine did not load the newest weights or adapters, or the running router did not accept
                it.
        """
        while True:
            await self._resumed.wait()
            try:
                if self.newest is not None and engine.weights != self.newest:
                    await self._load(engine, self.newest)
                await self._load_adapters(engine)
            except ServingError as error:
                raise StartupError(f"{engine.name}: {error}. {await engine.server.log_tail()}") from None
            async with self._changing:
                if self.paused or engine.weights != self.newest or engine.adapters != self.adapters:
                    continue
                try:
                    await self.router.add(engine.url)
                except StartupError:
                    if self.router.running:
                        raise
                    # The router has just ended. Its restart adds every engine that serves.
                if engine not in self.engines:
                    self.engines.append(engine)
                return

    async def remove(self, engine: RoutedEngine) -> None:
        """Remove a lost engine."""
        if engine in self.engines:
            self.engines.remove(engine)
        try:
            await self.router.remove(engine.url)
        except StartupError as error:
            # An ended router has lost its list anyway, and a slow one notices by its health checks.
            log.warning("the engine %s ended, and the router did not remove it: %s", engine.url, error)

    async def start_router(self) -> None:
        """Start or restart the router, and add every engine that serves.

        Raises:
            StartupError: the router did not start, or ended while the engines were added.
        """
        async with self._changing:
            await self.router.stop()
            await self.router.start()
            if not self.paused:
                await self._add_all()

    async def pause(self, urls: Iterable[str]) -> None:
        """Stop all generation of the engines at `urls`, and return once they are idle. Adds no engine until `resume`.

        An external vLLM server is not paused: when its memory is released, it aborts its requests itself and holds
        new ones.
        """
        await self._pause_additions()
        if self._pauses:
            for url, failure in (await _twice_on_each(urls, lambda url: pause_generation(url, self.engine))).items():
                log.error("the server %s may die when its memory is released: %s", url, failure)

    async def resume(self, urls: Iterable[str]) -> None:
        """Resume generation, and add every engine that serves."""
        if self._pauses:
            for url, failure in (await _twice_on_each(urls, lambda url: resume_generation(url, self.engine))).items():
                log.warning("the server %s may hold its calls: %s", url, failure)
        await self._resume_additions()

    async def update_weights(self, weights: Weights, commit: Callable[[], Awaitable[None]]) -> Mapping[str, str]:
        """Serve these weights from now on. Restart the engines that did not load them, and return their names with
        the reasons.

        Calls in flight are aborted and return their tokens, with the version that sampled them; new ones wait in the
        engines. If an engine loaded the weights, `commit` is called before it samples with them, and engines that
        start later load them too. If none did, all restart with the previous weights.

        Raises:
            ServingError: the engines are paused, or `commit` raised it; all then restart with the previous weights.
        """
        if self.paused:
            raise ServingError("the engines are paused: call resume_engines before update_weights")

        async def replace(engine: RoutedEngine) -> None:
            await pause_generation(engine.url, self.engine)
            await self._load(engine, weights)

        async with self._additions_paused():
            engines = [*self.engines]
            failed = dict.fromkeys(engines, "the update was interrupted")
            try:
                not_loaded = await _on_each(engines, replace)
                if len(not_loaded) < len(engines) or not engines:
                    await commit()
                    self.newest = weights
                loaded = [engine for engine in engines if engine not in not_loaded]
                failed = not_loaded | await _on_each(loaded, self._resume)
            finally:
                await self._give_up_on(failed, f"version {weights.version} of the weights")
        return {engine.name: why for engine, why in failed.items()}

    async def load_adapter(
        self, adapter: Adapter, commit: Callable[[], Awaitable[None]], announce: Callable[[], Awaitable[None]]
    ) -> Mapping[str, str]:
        """Serve this version of an adapter from now on. Return the engines that did not load it, with the reasons.

        The engines continue to sample while they load it. If one of them loaded it, `commit` is called, then
        `announce`, after which model calls name this version. Each engine then pauses, aborts its calls in flight,
        which return their tokens, and unloads the previous version; engines that did not load it restart. If none
        loaded it, nothing changes.

        Raises:
            ServingError: `commit` or `announce` raised it, and all engines restart with the committed adapters.
        """

        async def load(engine: RoutedEngine) -> None:
            await load_on_engine(engine.url, adapter, self.engine)

        async def switch(engine: RoutedEngine) -> None:
            if before is not None:
                await pause_generation(engine.url, self.engine, keep_cache=True)
                await unload_from_engine(engine.url, before, self.engine)
                await self._resume(engine)

        async with self._additions_paused():
            engines = [*self.engines]
            failed = dict.fromkeys(engines, "the update was interrupted")
            before = self.adapters.get(adapter.name)
            try:
                not_loaded = await _on_each(engines, load)
                if engines and len(not_loaded) == len(engines):
                    failed = {}
                    # An engine whose answer was lost has it, and would refuse the next adapter of this name.
                    await _on_each(engines, lambda engine: unload_from_engine(engine.url, adapter, self.engine))
                    return {engine.name: why for engine, why in not_loaded.items()}
                await commit()
                self.adapters[adapter.name] = adapter
                await announce()
                loaded = [engine for engine in engines if engine not in not_loaded]
                for engine in loaded:
                    engine.adapters[adapter.name] = adapter
                failed = not_loaded | await _on_each(loaded, switch)
            finally:
                await self._give_up_on(failed, f"the adapter {adapter.engine_name}")
        return {engine.name: why for engine, why in failed.items()}

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter that no model call uses any more."""
        async with self._additions_paused():
            before = self.adapters.pop(name)
            engines = [*self.engines]
            for engine in engines:
                engine.adapters.pop(name, None)
            failed = await _on_each(engines, lambda engine: unload_from_engine(engine.url, before, self.engine))
            for engine, why in failed.items():
                log.warning("%s keeps memory for the adapter %s: %s", engine.name, before.engine_name, why)

    async def _give_up_on(self, failed: Mapping[RoutedEngine, str], what: str) -> None:
        """Restart the engines that failed to load something, and remove them."""
        for engine, why in failed.items():
            engine.restart(f"{what}: {why}")
        # Together, because a router that hangs takes its time for each.
        await asyncio.gather(*map(self.remove, failed))

    async def _resume(self, engine: RoutedEngine) -> None:
        await resume_generation(engine.url, self.engine)

    async def _load(self, engine: RoutedEngine, weights: Weights) -> None:
        """Load the weights. Raises ServingError on failure."""
        await load_weights(engine.url, weights, self._serving)
        engine.weights = weights

    async def _load_adapters(self, engine: RoutedEngine) -> None:
        """Make an engine that gets no calls yet load the adapters. Raises ServingError on failure."""
        for name, adapter in [*engine.adapters.items()]:
            if self.adapters.get(name) != adapter:
                await unload_from_engine(engine.url, adapter, self.engine)
                del engine.adapters[name]
        for name, adapter in [*self.adapters.items()]:
            if name not in engine.adapters:
                await load_on_engine(engine.url, adapter, self.engine)
                engine.adapters[name] = adapter

    @asynccontextmanager
    async def _additions_paused(self) -> AsyncIterator[None]:
        await self._pause_additions()
        try:
            yield
        finally:
            await self._resume_additions()

    async def _pause_additions(self) -> None:
        self._resumed.clear()
        # Wait for an addition in progress, which requests `/health`.
        async with self._changing:
            pass

    async def _resume_additions(self) -> None:
        self._resumed.set()
        async with self._changing:
            try:
                await self._add_all()
            except StartupError as error:
                log.info("the engines are added when the router has restarted: %s", error)

    async def _add_all(self) -> None:
        """Add every engine that serves, and restart each engine that the router refuses twice."""

        async def add(engine: RoutedEngine) -> None:
            await self.router.add(engine.url)

        refused = await _on_each(self.engines, add)
        refused = await _on_each((engine for engine in refused if engine in self.engines), add)
        if not self.router.running:
            raise StartupError("the router ended while its engines were added")
        for engine, why in refused.items():
            engine.restart(why)


async def _twice_on_each(targets: Iterable[_T], act: Callable[[_T], Awaitable[None]]) -> dict[_T, str]:
    """Act like `_on_each`, and retry each failure once, because a request or its answer may have been lost."""
    return await _on_each(await _on_each(targets, act), act)


async def _on_each(targets: Iterable[_T], act: Callable[[_T], Awaitable[None]]) -> dict[_T, str]:
    """Act on the targets concurrently. Return the reason for each failure."""

    async def outcome(target: _T) -> str:
        try:
            await act(target)
        except (ServingError, OSError) as error:
            # Reading a folder with weights can raise OSError.
            return str(error) or type(error).__name__
        return ""

    targets = list(targets)
    outcomes = await asyncio.gather(*map(outcome, targets))
    return {target: why for target, why in zip(targets, outcomes, strict=True) if why}
