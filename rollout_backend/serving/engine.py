"""What an engine is: a server of the model that is started, watched and stopped. And how it is probed.

An `Engine` is not restartable: its factory makes a new one. `rollout_backend.config.serving` lists the kinds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol, runtime_checkable

import aiohttp

from rollout_backend.config import EngineName, RolloutConfig


class Engine(Protocol):
    @property
    def url(self) -> str:
        """The engine's URL, without a slash at the end; set once it has started."""
        ...

    async def start(self) -> None:
        """Start the engine; return once it is healthy. Raise StartupError if it does not become so."""
        ...

    async def wait(self) -> str:
        """Return how the engine ended, once it has, with the end of its log."""
        ...

    async def stop(self) -> None:
        """End the engine and all its processes, in any state."""
        ...

    async def log_tail(self) -> str:
        """Return the end of the engine's log, for an error message."""
        ...


@runtime_checkable
class ReservingEngine(Protocol):
    """An engine that may have to wait for something else before it can start: a machine, or another one's server."""

    def reserve(self) -> AsyncIterator[str]:
        """Wait, before `start`. Yield what the engine waits for, once it has waited for `REPORT_WAIT_AFTER_S`.

        Raises:
            StartupError: the wait was too long.
        """
        ...


MakeEngine = Callable[[int], Engine]
"""See `EngineFactory.make`."""


class EngineFactory(ABC):
    """Makes the engines of one `serving.kind`."""

    count: int  # how many to start with
    takes_weights: ClassVar[bool] = False
    """True if this side starts its engines, and they load new weights and adapters through the HTTP interface of
    `serving.engine`."""

    @abstractmethod
    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        """Set `count`, unless `open` does. Start nothing yet."""

    async def open(self) -> None:  # noqa: B027  # most kinds prepare nothing
        """Prepare before the first engine is made; `count` is final then. Raise StartupError or ConfigError."""

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        """Call `serve_with` with the URLs of all engines whenever they change; by default they never do."""
        while True:
            await asyncio.Event().wait()

    @abstractmethod
    def make(self, number: int) -> Engine:
        """Make the engine with a number, from 0; called again for each restart."""


REPORT_WAIT_AFTER_S = 5.0

PROBE = "/model_info"
"""The path that shows that a server is alive. Unlike `/health`, which generates a token unless
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, it never touches the GPU: generating on a server whose memory is released
kills it."""
_PROBES: Mapping[EngineName, str] = {"sglang": PROBE, "vllm": "/health"}  # vLLM's never generates
_VERSIONS: Mapping[EngineName, str] = {"sglang": "/server_info", "vllm": "/version"}


def probe_url(url: str, engine: EngineName) -> str:
    """Return the URL that shows that a server is alive."""
    return url + _PROBES[engine]


async def is_responding(url: str, engine: EngineName = "sglang", timeout_s: float = 5.0) -> bool:
    """Return whether the server answers a probe with 200 in time."""
    return await _is_ok(probe_url(url, engine), timeout_s)


async def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    """Return whether `/health` answers 200 in time.

    For servers that this side starts: it answers 503 until they are ready, and generates nothing there.
    """
    return await _is_ok(f"{url}/health", timeout_s)


async def reported_version(url: str, engine: EngineName = "sglang", timeout_s: float = 5.0) -> str | None:
    """Return the version of the engine that a server reports; None if it does not answer."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
            http.get(url + _VERSIONS[engine]) as response,
        ):
            info = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    version = info.get("version") if isinstance(info, dict) else None
    return version if isinstance(version, str) else None


async def _is_ok(url: str, timeout_s: float) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
            http.get(url) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
