"""Serve a run's model to its agents: engines, router, gateways, and the dialer to a relay.

Invariants:

- each part starts once the parts that it forwards to serve, and stops before them;
- no part outlives `stop`, even if `start` failed or was cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollout_backend.config import RolloutConfig
from rollout_backend.serving.engine_fleet import EngineFleet, ServerState
from rollout_backend.serving.gateway_fleet import GatewayFleet
from rollout_backend.serving.relay_process import DialerProcess, public_gateway_config
from rollout_backend.serving.run_phase import RunPhase
from rollout_backend.serving.run_secret import key_secret
from rollout_backend.serving.supervisor import OnEvent


class ModelServing:
    """What serves one run's model calls. `gateways` is set by `start`, and `dialer` too if the run has a relay."""

    gateways: GatewayFleet

    def __init__(self, config: RolloutConfig, log_dir: Path, on_event: OnEvent = lambda event: None) -> None:
        """Prepare the engines; nothing starts yet. Raise ConfigError if `serving.kind` names no engine factory."""
        self.engines = EngineFleet(config, log_dir, on_event)
        self.dialer: DialerProcess | None = None
        self._config = config
        self._log_dir = log_dir
        self._on_event = on_event
        self._stack = AsyncExitStack()

    async def start(
        self,
        secret: str,
        on_phase: Callable[[RunPhase], object] = lambda phase: None,
        on_status: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Start everything; `stop` ends it. `secret` is the run's, from which keys and seals are made.

        Raises:
            StartupError: a part did not start, with the end of its log.
        """
        config = self._config
        on_phase(RunPhase.ENGINES)
        self._stack.push_async_callback(self.engines.stop)
        await self.engines.start()
        on_phase(RunPhase.GATEWAY)
        self.gateways = GatewayFleet(
            public_gateway_config(config),
            self.engines.router_url,
            self._log_dir,
            key_secret(secret, config.run_id),
            seal_secret=secret,
            journals=config.run_dir / "gateway",
            on_event=self._on_event,
        )
        self._stack.push_async_callback(self.gateways.stop)
        await self.gateways.start()
        if config.relay is not None:
            on_status(f"dialling out to the relay at {config.relay.url}")
            self.dialer = DialerProcess(config.relay, self.gateways.urls, self._log_dir / "relay.log")
            self._stack.push_async_callback(self.dialer.stop)
            await self.dialer.start()

    async def stop(self) -> None:
        """Stop what has started, in reverse order."""
        await self._stack.aclose()

    def failures(self) -> list[Coroutine[Any, Any, None]]:
        """Return a coroutine for each part, which raises ServingError once the part is lost for good."""
        dialer = [self.dialer.failed()] if self.dialer is not None else []
        return [self.engines.failed(), self.gateways.failed(), *dialer]

    async def follow_engines(self, urls: Sequence[str]) -> None:
        """Serve with these engines from now on."""
        await self.engines.follow(urls)

    async def pause(self) -> None:
        """Hold all model calls, and return once no call is at an engine and every engine is idle.

        Raises:
            ServingError: a gateway does not answer. The engines are paused all the same.
        """
        try:
            await self.gateways.pause()
        finally:
            await self.engines.sleep()

    async def resume(self) -> None:
        """Let model calls reach the engines again. Raise ServingError if a gateway does not answer."""
        await self.engines.wake()
        await self.gateways.resume()

    def snapshot(self) -> tuple[ServerState, ...]:
        """Return the state of the router and of each engine."""
        return self.engines.snapshot()
