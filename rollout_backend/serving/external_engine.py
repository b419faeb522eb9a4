"""Engines that something else runs (`serving.kind=external`): awaited and watched, never started or stopped.

A host name, such as that of a headless service of Kubernetes, stands for one server per address.

Invariant: a name that cannot be resolved keeps its last addresses. Its servers may be up all the same, and the fleet
notices those that are not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from yarl import URL

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import PreflightError, StartupError
from rollout_backend.serving import engine
from rollout_backend.serving.engine import EngineFactory, is_responding, probe_url
from rollout_backend.serving.model_server import check_reads_seeds, check_records_experts, check_vllm

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
        self._seeded = config.sampling.seed is not None
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
                return
            if self._records_experts:
                await check_records_experts(self.url)
            if self._seeded:
                await check_reads_seeds(self.url)
        except PreflightError as error:
            raise StartupError(f"{self._name}: {error}") from None

    async def wait(self) -> str:
        while True:  # its process is not visible; only a probe shows its end
            await asyncio.Event().wait()

    async def stop(self) -> None:
        pass

    async def log_tail(self) -> str:
        return ""


log = logging.getLogger(__name__)


class ServiceAddresses:
    every_s = 5.0
    """Time between two look-ups in `follow`."""

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` name the services: their hosts stand for all addresses, and the rest is kept."""
        self._found: dict[str, list[str]] = {url: [] for url in urls}
        self._unresolved: set[str] = set()

    async def look_up(self) -> list[str]:
        """Return the URL of each server, in the order of the services and their addresses."""
        for url in self._found:
            try:
                self._found[url] = await _addresses(url)
                self._unresolved.discard(url)
            except OSError as error:
                if url not in self._unresolved:
                    log.warning("%s cannot be resolved (%s): its last addresses are kept", url, error)
                self._unresolved.add(url)
        return list(dict.fromkeys(address for found in self._found.values() for address in found))

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        """Look the names up every few seconds. Call `serve_with` with all servers when they have changed."""
        before = [address for found in self._found.values() for address in found]
        while True:
            await asyncio.sleep(self.every_s)
            now = await self.look_up()
            if now != before:
                await serve_with(now)
                before = now


async def _addresses(url: str) -> list[str]:
    """Return the URL with each address of its host. Raises OSError."""
    parsed = URL(url)
    found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [str(parsed.with_host(host)).rstrip("/") for host in hosts]
