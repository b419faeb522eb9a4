"""Engines that something else runs (`serving.kind=external`): awaited and watched, never started or stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import PreflightError, StartupError
from rollout_backend.serving import engine
from rollout_backend.serving.engine import EngineFactory, is_responding, probe_url
from rollout_backend.serving.model_server import check_records_experts, check_vllm
from rollout_backend.serving.service_addresses import ServiceAddresses

_LOOK_UP_S = 1.0


class ExternalEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=external`."""

    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        self._config = config
        self._serving = config.serving
        self._urls: Sequence[str] = config.serving.urls
        self._addresses = ServiceAddresses(self._urls) if config.serving.follow_dns else None
        self.count = len(self._urls)

    async def open(self) -> None:
        """With `serving.follow_dns`, wait for an address. Raises StartupError."""
        if self._addresses is None:
            return
        try:
            async with asyncio.timeout(self._serving.startup_s()):
                while True:
                    if found := await self._addresses.look_up():
                        self._urls, self.count = found, len(found)
                        return
                    await asyncio.sleep(_LOOK_UP_S)
        except TimeoutError:
            names = ", ".join(self._serving.urls)
            raise StartupError(f"no address of {names} was found: correct serving.urls") from None

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        if self._addresses is not None:
            await self._addresses.follow(serve_with)
        await super().follow(serve_with)

    def make(self, number: int) -> ExternalEngine:
        return ExternalEngine(f"engine-{number}", self._urls[number], self._config)


class ExternalEngine:
    """A server at `url` that something else runs."""

    def __init__(self, name: str, url: str, config: RolloutConfig) -> None:
        self._name = name
        self._engine = config.serving.engine
        self._records_experts = config.model.routed_experts
        self._timeout_s = config.serving.startup_s()
        self.url = url.rstrip("/")

    async def reserve(self) -> AsyncIterator[str]:
        """Wait until the server answers."""
        began, reported = time.monotonic(), False
        while not await is_responding(self.url, self._engine):
            waited = time.monotonic() - began
            if waited > self._timeout_s:
                probed = probe_url(self.url, self._engine)
                raise StartupError(
                    f"{self._name}: {probed} did not answer 200 within {self._timeout_s:g} s: "
                    "start that server, or correct serving.urls"
                )
            if not reported and waited > engine.REPORT_WAIT_AFTER_S:
                reported = True
                yield f"waits for {self.url} to answer"
            await asyncio.sleep(0.5)

    async def start(self) -> None:
        """Raise StartupError for a server that was started without the options that rollouts need."""
        try:
            if self._engine == "vllm":
                await check_vllm(self.url)
            elif self._records_experts:
                await check_records_experts(self.url)
        except PreflightError as error:
            raise StartupError(f"{self._name}: {error}") from None

    async def wait(self) -> str:
        await asyncio.Event().wait()  # its process is not visible; only a probe shows its end
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        pass

    async def log_tail(self) -> str:
        return ""
