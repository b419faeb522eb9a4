"""Start, watch, restart and stop all engines and the router in front of them.

For vLLM, an `EngineDirectory` replaces the router.

    async with EngineFleet(config, log_dir, on_event) as fleet:
        ...  # fleet.router_url
        await fleet.failed()  # in a separate task

Invariants:

- The router sends requests to exactly the engines that serve. A lost engine is removed immediately, restarted and
  added again. A lost router is restarted on the same port with all engines.
- An engine that does not start or is lost repeatedly does not affect the others. The run ends once no engine is left
  that may be restarted (`serving.max_restarts` within `serving.restart_window_s`).
- An engine that samples nothing for `timeouts.model_call_s` is lost: it answers no call in time. An engine that is
  busy with a long queue or prompt is not.
- While the engines are paused, the fleet sends no generating request and counts no restarts.
- No process started by the fleet outlives it, even if `start` fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import aiohttp

from rollout_backend.config import ENGINE_KINDS, EngineName, RolloutConfig
from rollout_backend.config.section import import_path
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.gateway.engine.liveness import SamplingProbe
from rollout_backend.model.gateway.engine.protocol import EngineProtocol, SglangProtocol, VllmProtocol
from rollout_backend.model.serving.adapters import Adapter
from rollout_backend.model.serving.engine import Engine, EngineFactory, MakeEngine, ReservingEngine, is_responding
from rollout_backend.model.serving.engine_routing import EngineRouter, EngineRouting, RoutedEngine
from rollout_backend.model.serving.external_engine import ExternalEngine
from rollout_backend.model.serving.router import EngineDirectory, Router
from rollout_backend.model.serving.supervisor import (
    OnEvent,
    Probing,
    RestartLimits,
    ServingEvent,
    Supervisor,
    SupervisorGroup,
    first_of,
)
from rollout_backend.model.serving.weights import Weights

_JOIN_S = 10.0
_PROTOCOLS: Mapping[EngineName, EngineProtocol] = {"sglang": SglangProtocol(), "vllm": VllmProtocol()}


@dataclass(frozen=True)
class ServerState:
    """Current state of one server.

    `serving` is true if the server is up and, for an engine, known to the router. `paused` is true while a trainer
    uses its memory. `waiting_for` names what it needs before it can start, such as a machine.
    """

    name: str
    url: str
    serving: bool
    restarts: int
    paused: bool = False
    waiting_for: str = ""


class EngineFleet:
    """Starts, watches and stops the engines. Enter it, or call `start` and `stop`, once.

    `routing` loads new weights and adapters.
    """

    def __init__(
        self,
        config: RolloutConfig,
        log_dir: Path,
        on_event: OnEvent = lambda event: None,
        *,
        factory: EngineFactory | None = None,
        probing: Probing | None = None,
        newest: Weights | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """Initialize.

        `factory` makes the engines; the default is the factory of `serving.kind`. Before they serve, engines load
        the weights `newest`, or those of `model.path` if it is None, and the adapters in `adapters`, by name.
        """
        self._factory = factory or engine_factory(config, log_dir)
        self._config = config
        self._on_event = on_event
        # Engine events set this.
        self._changed = asyncio.Event()
        self._limits = RestartLimits(config.serving.max_restarts, config.serving.restart_window_s)
        self._probing = probing or Probing()
        self._router: EngineRouter = (
            EngineDirectory(config.router)
            if config.serving.engine == "vllm"
            else Router(
                config.router,
                log_dir / "router.log",
                config.timeouts.model_call_s,
                health_check_s=math.ceil(2 * self._probing.interval_s),
            )
        )
        self.routing = EngineRouting(self._router, config.serving, newest, adapters)
        self._router_supervisor = RouterSupervisor(self.routing, self._limits, on_event, self._probing)
        self._engines: list[EngineSupervisor] = []
        self._supervisors = SupervisorGroup()
        self._next_number = 0
        self._following = asyncio.Lock()

    @property
    def router_url(self) -> str:
        """The router's URL, which does not change once the fleet has started."""
        return self._router.url

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """URLs of the engines that serve at the moment."""
        return tuple(engine.url for engine in self._engines if engine.serving)

    def snapshot(self) -> tuple[ServerState, ...]:
        """Return the current state of the router, followed by the engines."""
        router, paused = self._router_supervisor, self.routing.paused
        return (
            ServerState(router.name, self._router.url, router.serving, router.restarts),
            *(
                ServerState(each.name, each.url, each.serving, each.restarts, paused, each.waiting_for)
                for each in self._engines
            ),
        )

    # --- start and end ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the router and all engines. Return once enough engines get requests and none is still starting.

        `serving.min_servers` are enough. Engines that wait for resources or failed to start join later.

        Raises:
            StartupError: the router or too many engines failed to start. Everything that had started is stopped.
            ConfigError: the CPU engine is not installed.
        """
        try:
            await self._factory.open()
            count, make = self._factory.count, self._factory.make
            self._next_number = count
            self._engines += [self._supervisor(number, make) for number in range(count)]
            await self._router_supervisor.start()
            self._router_supervisor.report("started")
            for engine in self._engines:
                self._supervisors.add(engine)
            await self._supervisors.run_until(self._started())
            if len(self.engine_urls) < self._least:
                raise StartupError(self._too_few())
        except BaseException:
            await self.stop()
            raise
        self._supervisors.add(self._router_supervisor)

    async def follow(self, urls: Sequence[str]) -> None:
        """Replace the set of engines, for `serving.kind=external`.

        An omitted engine gets no more requests. A new one gets requests once it answers. This call waits up to 10 s
        for it, and then continues to wait in the background.
        """
        async with self._following:
            left = [engine for engine in self._engines if engine.url not in urls]
            for engine in left:
                self._engines.remove(engine)
                await self._supervisors.remove(engine)
            await asyncio.gather(*(engine.release() for engine in left))
            for engine in left:
                engine.report("left")
            known = {engine.url for engine in self._engines}
            joined = [self._join(url) for url in urls if url not in known]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_JOIN_S):
                    await self._supervisors.run_until(_tried(joined))

    async def pause(self) -> None:
        """Stop all generation before a trainer takes the engines' memory. Return once every engine is idle.

        verl's servers assert that they are idle when their memory is released, and a request that generates before
        they have it back crashes them. Generation is therefore paused too, so that late requests wait in the server.
        Until `resume` no engine is probed or added to the router, which would request `/health`.
        """
        await self.routing.pause([engine.url for engine in self._engines])

    async def resume(self) -> None:
        """Serve again after `pause`."""
        await self.routing.resume([engine.url for engine in self._engines])

    @property
    def takes_weights(self) -> bool:
        """True if engines of this kind load new weights and adapters."""
        return self._factory.takes_weights

    async def stop(self) -> None:
        """Stop all servers. May be called twice, and after a failed start."""
        await self._supervisors.stop()
        stops = [self._router.stop(), *(engine.server.stop() for engine in self._engines)]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for server in (self._router_supervisor, *self._engines):
            server.serving = False
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def failed(self) -> NoReturn:
        """Wait until the fleet can no longer serve.

        Raises:
            StartupError: the router or the last engine is gone; the message includes the end of its log.
        """
        while True:
            await first_of(self._supervisors.failed(), self._factory.follow(self.follow))

    # --- parts ------------------------------------------------------------------------------------------------

    @property
    def _least(self) -> int:
        """Number of engines that must serve before the run begins."""
        return min(self._config.serving.min_servers, len(self._engines)) or 1

    async def _started(self) -> None:
        """Return once enough engines serve and none is still starting, or once too few are left."""
        while True:
            self._changed.clear()
            serving = len(self.engine_urls)
            starting = [each for each in self._engines if not each.tried.is_set()]
            waiting = [each for each in starting if each.waiting_for]
            restarting = [each for each in self._engines if each.has_served and not (each.serving or each.gave_up)]
            if serving >= self._least and len(starting) == len(waiting):
                return
            if serving + len(starting) + len(restarting) < self._least:
                return
            await self._changed.wait()

    def _too_few(self) -> str:
        """Return why too few engines serve."""
        failed = [each for each in self._engines if not each.serving]
        why = next((each.last_words for each in failed if each.last_words), "they did not start")
        if len(failed) < len(self._engines):
            return f"only {len(self.engine_urls)} engines serve, and serving.min_servers is {self._least}: {why}"
        return why + (f" The other {len(failed) - 1} engines failed too." if len(failed) > 1 else "")

    def _on_engine_event(self, event: ServingEvent) -> None:
        self._changed.set()
        self._on_event(event)

    def _supervisor(self, number: int, make: MakeEngine) -> EngineSupervisor:
        return EngineSupervisor(
            number,
            make,
            self.routing,
            self._engines,
            self._limits,
            self._on_engine_event,
            self._probing,
            self._config.timeouts.model_call_s / self._probing.failures,
        )

    def _join(self, url: str) -> EngineSupervisor:
        number, self._next_number = self._next_number, self._next_number + 1
        engine = self._supervisor(number, lambda i: ExternalEngine(f"engine-{i}", url, self._config))
        self._engines.append(engine)
        self._supervisors.add(engine)
        return engine


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
        engines: Sequence[EngineSupervisor],
        limits: RestartLimits,
        on_event: OnEvent,
        probing: Probing,
        sample_s: float,
    ) -> None:
        """`engines` are all engines of the fleet. `sample_s` is the time limit to sample one token for a probe."""
        super().__init__(f"engine-{number}", limits, on_event, probing)
        self.server: Engine = make(number)
        # What the engine needs before it can start, while it waits.
        self.waiting_for = ""
        self._number = number
        self._make = make
        self._routing = routing
        # Set from the start of the server to its release.
        self._routed: RoutedEngine | None = None
        self._engines = engines
        self._probes = probing
        self._sample_s = sample_s
        self._sampling: SamplingProbe
        # Loop time when the engine last sampled, as far as known.
        self._sampled_at = 0.0

    @property
    def url(self) -> str:
        return self.server.url

    async def start_server(self) -> None:
        if self.tried.is_set():
            self.server = self._make(self._number)
        if isinstance(self.server, ReservingEngine):
            try:
                async for waiting_for in self.server.reserve():
                    self.waiting_for = waiting_for
                    self.report("waiting", waiting_for)
            finally:
                self.waiting_for = ""
        await self.server.start()
        self._sampling = SamplingProbe(self.url, _PROTOCOLS[self._routing.engine])
        self._sampled_at = asyncio.get_running_loop().time()
        self._routed = RoutedEngine(self.name, self.server)
        await self._routing.add(self._routed)
        if isinstance(self.server, ExternalEngine):
            # An external engine was not restarted: it answers again.
            self.budget.clear()

    async def wait_ended(self) -> str:
        assert self._routed is not None, "not started"
        return await first_of(self.server.wait(), self._routed.wait_unfit())

    async def is_responding(self) -> bool:
        if self._routing.paused:
            return True
        if not await is_responding(self.url, self._routing.engine, self._probes.timeout_s):
            return False
        loop = asyncio.get_running_loop()
        if loop.time() < self._sampled_at + self._probes.sample_every_s:
            return True
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            state = await self._sampling.state(http, self._sample_s)
        if state == "hung" and not self._routing.paused:
            return False
        self._sampled_at = loop.time()
        return True

    async def log_tail(self) -> str:
        return await self.server.log_tail()

    async def release(self) -> None:
        if self._routed is not None:
            routed, self._routed = self._routed, None
            await self._routing.remove(routed)
        await self.server.stop()

    async def exhausted(self, wait_s: float) -> None:
        """Wait until a restart is allowed again. Raises StartupError if no other engine is left."""
        engines = self._engines
        if all(engine.gave_up for engine in engines):
            self.report("gave_up", self.last_words)
            others = ", and no other engine is left" if len(engines) > 1 else ""
            raise StartupError(f"{self.gone}{others}: {self.last_words}")
        up = sum(engine.serving for engine in engines)
        self.report("gave_up", f"{self.gone}; {up} of {len(engines)} engines serve")
        await asyncio.sleep(wait_s)


async def _tried(engines: Sequence[EngineSupervisor]) -> None:
    """Return once each engine has started or failed to start."""
    for engine in engines:
        await engine.tried.wait()


def engine_factory(config: RolloutConfig, log_dir: Path) -> EngineFactory:
    """Create the factory that `serving.kind` names.

    Raises:
        ConfigError: the import path does not name a subclass of EngineFactory.
    """
    kind = config.serving.kind
    found = import_path(ENGINE_KINDS.get(kind, kind))
    if not (isinstance(found, type) and issubclass(found, EngineFactory)):
        raise ConfigError(f"serving.kind: {kind!r} is not a subclass of EngineFactory")
    return found(config, log_dir)
