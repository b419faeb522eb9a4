"""Pause and resume the generation of a server, for a trainer that takes its memory in between."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from rollout_backend.config import EngineName

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
_POLL_S = 0.1


async def pause_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Abort all generation, make the server queue new requests, and return once its scheduler is idle.

    SGLang takes seconds to notice that a client has disconnected, and an aborted request runs until the end of its
    batch. `/flush_cache` succeeds only if the scheduler is idle, which SGLang also asserts when its memory is
    released.

    vLLM returns from `/pause` when it is idle. It has the endpoint only with VLLM_SERVER_DEV_MODE=1.
    """
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            if engine == "vllm":
                await _post(http, f"{url}/pause?mode=abort")
                return
            await _post(http, f"{url}/pause_generation", {"mode": "abort"})
            while not await _post(http, f"{url}/flush_cache"):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        log.error(  # noqa: TRY400
            "the server %s was not idle after %g s; it may die when its memory is released", url, timeout_s
        )
    except aiohttp.ClientError as error:
        log.warning("the server %s did not pause its generation: %s", url, error or type(error).__name__)


async def resume_generation(url: str, engine: EngineName = "sglang", timeout_s: float = _TIMEOUT_S) -> None:
    """Undo `pause_generation`."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            if engine == "vllm":
                await _post(http, f"{url}/resume")
            elif not await _post(http, f"{url}/continue_generation"):
                log.warning("the server %s refused to resume its generation", url)
    except (aiohttp.ClientError, TimeoutError) as error:
        log.warning("the server %s did not resume its generation: %s", url, error or type(error).__name__)


async def _post(http: aiohttp.ClientSession, url: str, body: object = None) -> bool:
    async with http.post(url, json=body if body is not None else {}) as reply:
        return reply.status == 200
