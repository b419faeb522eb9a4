"""Define an engine, a server of the model: its life cycle, its probes, and the control of its generation.

An `Engine` cannot be restarted: its factory makes a new one. `rollout_backend.config.serving` lists the kinds.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol, runtime_checkable

import aiohttp

from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import EngineName, RolloutConfig
from rollout_backend.errors import ServingError

REPORT_WAIT_AFTER_S = 5.0
PROBE = "/model_info"
"""The path of the liveness probe. It never touches the GPU, unlike `/health`, which generates a token unless
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0. Generating crashes a server whose memory is released."""
# vLLM's `/health` never generates.
_PROBES: Mapping[EngineName, str] = {"sglang": PROBE, "vllm": "/health"}
_VERSIONS: Mapping[EngineName, str] = {"sglang": "/server_info", "vllm": "/version"}
_PROBE_S = 5.0
# Timeout of calls that control generation.
_TIMEOUT_S = 60.0
_POLL_S = 0.1
_MESSAGE_CHARS = 500


class Engine(Protocol):
    @property
    def url(self) -> str:
        """URL without a trailing slash; set once the engine has started."""
        ...

    async def start(self) -> None:
        """Start the engine, and return once it is healthy. Raises StartupError if it does not become healthy."""
        ...

    async def wait(self) -> str:
        """Wait until the engine has ended. Return how it ended, with the end of its log."""
        ...

    async def stop(self) -> None:
        """End the engine and all its processes, in any state."""
        ...

    async def log_tail(self) -> str:
        """Return the end of the engine's log, for an error message."""
        ...


@runtime_checkable
class ReservingEngine(Protocol):
    """An engine that may have to wait for other resources before it can start, such as a machine."""

    def reserve(self) -> AsyncIterator[str]:
        """Wait before `start`. Yield what the engine waits for, after `REPORT_WAIT_AFTER_S`.

        Raises:
            StartupError: the wait took too long.
        """
        ...


MakeEngine = Callable[[int], Engine]
"""See `EngineFactory.make`."""


class EngineFactory(ABC):
    """Makes the engines of one `serving.kind`."""

    count: int
    """Number of engines to start with."""
    takes_weights: ClassVar[bool] = False
    """True if they load new weights and adapters through the HTTP interface of `serving.engine`."""

    @abstractmethod
    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        """Set `count`, unless `open` does. Starts nothing."""

    async def check(self) -> Sequence[CheckResult]:
        """Check what the engines need, before anything is started. By default, nothing."""
        return ()

    async def open(self) -> None:  # noqa: B027
        """Prepare before the first engine is made; then `count` is final. Raises StartupError or ConfigError."""

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        """Call `serve_with` with the URLs of all engines whenever they change. By default, they never change."""
        while True:
            await asyncio.Event().wait()

    @abstractmethod
    def make(self, number: int) -> Engine:
        """Make the engine with this number, from 0. Called again for each restart."""


def probe_url(url: str, engine: EngineName) -> str:
    """Return the URL of a server's liveness probe."""
    return url + _PROBES[engine]


async def is_responding(url: str, engine: EngineName = "sglang", timeout_s: float = _PROBE_S) -> bool:
    """Return whether the server answers a probe with 200 in time."""
    return await _is_ok(probe_url(url, engine), timeout_s)


async def is_healthy(url: str) -> bool:
    """Return whether `/health` answers 200 in time.

    Use it for servers that this side starts, where it answers 503 until they are ready and generates nothing.
    """
    return await _is_ok(f"{url}/health", _PROBE_S)


async def reported_version(url: str, engine: EngineName) -> str | None:
    """Return the engine version that a server reports; None if it does not answer."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as http,
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


async def pause_generation(url: str, engine: EngineName, *, keep_cache: bool = False) -> None:
    """Abort all generation, make the server queue new requests until `resume_generation`, and return once it is idle.

    With `keep_cache`, its prefix cache is kept, and its scheduler may still work on aborted requests.

    SGLang takes seconds to notice that a client has disconnected, and an aborted request runs until the end of its
    batch. `/flush_cache` succeeds only if the scheduler is idle, which SGLang also asserts when its memory is
    released.

    vLLM answers `/pause` once it is idle. It has this endpoint only with VLLM_SERVER_DEV_MODE=1.

    Raises:
        ServingError: the server did not answer, or was not idle in time.
    """
    what = "pause its generation"
    if engine == "vllm":
        path = f"/pause?mode=abort&clear_cache={'false' if keep_cache else 'true'}"
        await control(url + path, {}, what, refused=". vLLM needs VLLM_SERVER_DEV_MODE=1 for that")
        return
    async with control_client(what if keep_cache else f"{what} and become idle") as http:
        await _post(http, f"{url}/pause_generation", {"mode": "abort"}, what)
        while not keep_cache:
            async with http.post(f"{url}/flush_cache", json={}) as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(_POLL_S)


async def resume_generation(url: str, engine: EngineName) -> None:
    """Undo `pause_generation`. Raises ServingError on failure."""
    await control(f"{url}/{'resume' if engine == 'vllm' else 'continue_generation'}", {}, "resume its generation")


async def control(
    url: str, body: Mapping[str, object], what: str, timeout_s: float = _TIMEOUT_S, *, refused: str = ""
) -> None:
    """Make a server do `what` by a POST. Raises ServingError unless it answers 200 in time.

    `refused` is appended to the message if the server answers with another status.
    """
    async with control_client(what, timeout_s) as http:
        await _post(http, url, body, what, refused)


async def _post(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, object], what: str, refused: str = ""
) -> None:
    async with http.post(url, json=body) as reply:
        if reply.status != 200:
            text = (await reply.text(errors="replace"))[:_MESSAGE_CHARS]
            raise ServingError(f"it answered {reply.status} to the request to {what}: {text}{refused}")


@contextlib.asynccontextmanager
async def control_client(what: str, timeout_s: float = _TIMEOUT_S) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an HTTP client for control requests. Raises ServingError if the server does not do `what` in time."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
        ):
            yield http
    except TimeoutError:
        raise ServingError(f"it did not {what} within {timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise ServingError(f"it did not {what}: {str(error) or type(error).__name__}") from None
