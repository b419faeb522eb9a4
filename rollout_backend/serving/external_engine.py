"""Engines that something else runs (`serving.kind=external`): awaited and watched, never started or stopped."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import StartupError
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

    async def start(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not await is_responding(self.url):
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{self._name}: {self.url}{PROBE} did not answer 200 within {self._timeout_s:g} s: "
                    "start that server, or correct serving.urls"
                )
            await asyncio.sleep(0.5)

    async def wait(self) -> str:
        await asyncio.Event().wait()  # its process is not visible; only a probe shows its end
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        pass

    async def log_tail(self) -> str:
        return ""
