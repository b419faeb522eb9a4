"""Engines that something else runs (`serving.kind=external`): awaited and watched, never started or stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import StartupError
from rollout_backend.serving import engine
from rollout_backend.serving.engine import PROBE, EngineFactory, is_responding


class ExternalEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=external`."""

    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        self.count = len(config.serving.urls)
        self._serving = config.serving

    def make(self, number: int) -> ExternalEngine:
        return ExternalEngine(f"engine-{number}", self._serving.urls[number], self._serving.startup_s())


class ExternalEngine:
    """A server at `url` that something else runs."""

    def __init__(self, name: str, url: str, startup_timeout_s: float) -> None:
        self._name = name
        self._timeout_s = startup_timeout_s
        self.url = url.rstrip("/")

    async def reserve(self) -> AsyncIterator[str]:
        """Wait until the server answers."""
        began, reported = time.monotonic(), False
        while not await is_responding(self.url):
            waited = time.monotonic() - began
            if waited > self._timeout_s:
                raise StartupError(
                    f"{self._name}: {self.url}{PROBE} did not answer 200 within {self._timeout_s:g} s: "
                    "start that server, or correct serving.urls"
                )
            if not reported and waited > engine.REPORT_WAIT_AFTER_S:
                reported = True
                yield f"waits for {self.url} to answer"
            await asyncio.sleep(0.5)

    async def start(self) -> None:
        pass

    async def wait(self) -> str:
        await asyncio.Event().wait()  # its process is not visible; only a probe shows its end
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        pass

    async def log_tail(self) -> str:
        return ""
