"""An engine, which is a server of the model: its life cycle, its probes, and the control of its generation.

An `Engine` is not restartable: its factory makes a new one. `rollout_backend.config.serving` lists the kinds.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol, runtime_checkable

import aiohttp

from rollout_backend.config import EngineName, RolloutConfig
from rollout_backend.errors import ServingError

REPORT_WAIT_AFTER_S = 5.0
PROBE = "/model_info"
"""The path that shows that a server is alive. Unlike `/health`, which generates a token unless
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, it never touches the GPU: generating on a server whose memory is released
kills it."""
_PROBES: Mapping[EngineName, str] = {"sglang": PROBE, "vllm": "/health"}  # vLLM's never generates
_VERSIONS: Mapping[EngineName, str] = {"sglang": "/server_info", "vllm": "/version"}
_TIMEOUT_S = 60.0  # of a call that controls generation
_POLL_S = 0.1


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


async def pause_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Abort all generation, make the server queue new requests, and return once its scheduler is idle.

    SGLang takes seconds to notice that a client has disconnected, and an aborted request runs until the end of its
    batch. `/flush_cache` succeeds only if the scheduler is idle, which SGLang also asserts when its memory is
    released.

    vLLM returns from `/pause` when it is idle. It has the endpoint only with VLLM_SERVER_DEV_MODE=1.

    Raises:
        ServingError: the server did not answer, or was not idle in time.
    """
    async with _control("pause its generation and become idle", timeout_s) as http:
        if engine == "vllm":
            if not await _post(http, f"{url}/pause?mode=abort"):
                raise ServingError("it refused to pause: vLLM needs VLLM_SERVER_DEV_MODE=1 for that")
            return
        if not await _post(http, f"{url}/pause_generation", {"mode": "abort"}):
            raise ServingError("it refused to pause its generation")
        while not await _post(http, f"{url}/flush_cache"):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


async def abort_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Abort all generation, and make the server queue new requests until `resume_generation`. Its prefix cache stays.

    Both engines return from the pause when no request runs.

    Raises:
        ServingError: the server did not, or not in time.
    """
    path = "/pause?mode=abort&clear_cache=false" if engine == "vllm" else "/pause_generation"
    async with _control("pause its generation", timeout_s) as http:
        if not await _post(http, url + path, {"mode": "abort"}):
            raise ServingError("it refused to pause its generation")


async def resume_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Undo `pause_generation` or `abort_generation`. Raise ServingError if the server does not."""
    async with _control("resume its generation", timeout_s) as http:
        if not await _post(http, f"{url}/{'resume' if engine == 'vllm' else 'continue_generation'}"):
            raise ServingError("it refused to resume its generation")


async def set_weight_version(url: str, version: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Set the version that a server reports of its weights. Raise ServingError if it refuses."""
    async with _control("set the version of its weights", timeout_s) as http:
        if not await _post(http, f"{url}/update_weight_version", {"new_version": version}):
            raise ServingError("it refused to set the version of its weights")


@contextlib.asynccontextmanager
async def _control(what: str, timeout_s: float) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an HTTP client for a call that makes the server do `what`. Raise ServingError if it does not answer."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            yield http
    except TimeoutError:
        raise ServingError(f"it did not {what} within {timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise ServingError(f"it did not {what}: {str(error) or type(error).__name__}") from None


async def _post(http: aiohttp.ClientSession, url: str, body: object = None) -> bool:
    async with http.post(url, json=body if body is not None else {}) as reply:
        return reply.status == 200
