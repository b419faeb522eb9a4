"""Pause and resume the generation of a server, while its memory or its weights belong to a trainer.

And set the version of its weights, which vLLM takes from no option.
"""

from __future__ import annotations

import asyncio

import aiohttp

from rollout_backend.config import EngineName
from rollout_backend.errors import ServingError

_TIMEOUT_S = 60.0
_POLL_S = 0.1


async def pause_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Abort all generation, make the server queue new requests, and return once its scheduler is idle.

    SGLang takes seconds to notice that a client has disconnected, and an aborted request runs until the end of its
    batch. `/flush_cache` succeeds only if the scheduler is idle, which SGLang also asserts when its memory is
    released.

    vLLM returns from `/pause` when it is idle. It has the endpoint only with VLLM_SERVER_DEV_MODE=1.

    Raises:
        ServingError: the server did not answer, or was not idle in time.
    """
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            if engine == "vllm":
                if not await _post(http, f"{url}/pause?mode=abort"):
                    raise ServingError("it refused to pause: vLLM needs VLLM_SERVER_DEV_MODE=1 for that")
                return
            if not await _post(http, f"{url}/pause_generation", {"mode": "abort"}):
                raise ServingError("it refused to pause its generation")
            while not await _post(http, f"{url}/flush_cache"):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ServingError(f"it was not idle {timeout_s:g} s after its generation was paused") from None
    except aiohttp.ClientError as error:
        raise ServingError(f"it did not pause its generation: {error or type(error).__name__}") from None


async def abort_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Abort all generation, and make the server queue new requests until `resume_generation`. Its prefix cache stays.

    Both engines return from the pause when no request runs.

    Raises:
        ServingError: the server did not, or not in time.
    """
    path = "/pause?mode=abort&clear_cache=false" if engine == "vllm" else "/pause_generation"
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            if not await _post(http, url + path, {"mode": "abort"}):
                raise ServingError("it refused to pause its generation")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServingError(f"it did not pause its generation: {error or type(error).__name__}") from None


async def resume_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Undo `pause_generation` or `abort_generation`. Raise ServingError if the server does not."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            if engine == "vllm":
                resumed = await _post(http, f"{url}/resume")
            else:
                resumed = await _post(http, f"{url}/continue_generation")
            if not resumed:
                raise ServingError("it refused to resume its generation")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServingError(f"it did not resume its generation: {error or type(error).__name__}") from None


async def set_weight_version(url: str, version: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Set the version that a server reports of its weights. Raise ServingError if it refuses."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            if not await _post(http, f"{url}/update_weight_version", {"new_version": version}):
                raise ServingError("it refused to set the version of its weights")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServingError(f"it did not set the version of its weights: {error or type(error).__name__}") from None


async def _post(http: aiohttp.ClientSession, url: str, body: object = None) -> bool:
    async with http.post(url, json=body if body is not None else {}) as reply:
        return reply.status == 200
