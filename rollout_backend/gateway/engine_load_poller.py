"""Poll the load of each engine at its `/v1/loads`. The router's `/workers` lists the engines.

sglang-router's own `/get_loads` uses a page that SGLang 0.5.23 no longer has.

Invariant: an engine that does not report its load causes one log line and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import aiohttp
from pydantic import BaseModel, ValidationError

from rollout_backend.gateway.admission import EngineLoad
from rollout_backend.gateway.direct_routing import DirectRouting

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class _Rank(BaseModel):
    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int = 0
    num_used_tokens: int = 0  # in the KV cache
    max_total_num_tokens: int = 0


class _Loads(BaseModel):
    loads: list[_Rank]  # one for each data parallel rank


class _Worker(BaseModel):
    url: str
    is_healthy: bool = True


class _Workers(BaseModel):
    workers: list[_Worker]


class EngineLoadPoller:
    """Passes the loads of all engines behind `url`, a router or an engine, to `observe`. Updates `engines.urls`."""

    def __init__(
        self,
        url: str,
        observe: Callable[[Sequence[EngineLoad]], None],
        interval_s: float = _INTERVAL_S,
        engines: DirectRouting | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._observe = observe
        self._known = engines or DirectRouting()
        self._interval_s = interval_s
        self._warned = False

    async def run(self) -> NoReturn:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
            while True:
                await self._poll(http)
                await asyncio.sleep(self._interval_s)

    async def _poll(self, http: aiohttp.ClientSession) -> None:
        engines = self._known.urls = await self._engines(http)
        found = await asyncio.gather(*(self._load(http, engine) for engine in engines))
        loads = [load for load in found if load is not None]
        if loads:
            self._observe(loads)
        elif engines and not self._warned:
            self._warned = True
            logger.info(
                "no engine reports its load at /v1/loads (asked: %s): calls are bounded by "
                "gateway.max_concurrent_calls alone",
                ", ".join(engines),
            )

    async def _engines(self, http: aiohttp.ClientSession) -> list[str]:
        listed = await listed_engines(http, self._url)
        if listed is None:  # a router that did not answer this time, or an engine
            return [*self._known.urls] or [self._url]
        return listed

    async def _load(self, http: aiohttp.ClientSession, engine: str) -> EngineLoad | None:
        page = await _get(http, f"{engine}/v1/loads?include=core")
        try:
            ranks = _Loads.model_validate(page).loads
        except ValidationError:
            return None
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            free=sum(max(0, rank.max_running_requests - rank.num_running_reqs) for rank in ranks),
            url=engine,
            kv_used=sum(rank.num_used_tokens for rank in ranks),
            kv_tokens=sum(rank.max_total_num_tokens for rank in ranks),
        )


async def listed_engines(http: aiohttp.ClientSession, url: str) -> list[str] | None:
    """Return the healthy engines of the router at `url`; None if it does not answer, or is an engine."""
    workers = await _get(http, f"{url}/workers")
    try:
        return [worker.url for worker in _Workers.model_validate(workers).workers if worker.is_healthy]
    except ValidationError:
        return None


async def _get(http: aiohttp.ClientSession, url: str) -> Any:
    """Return the page's JSON, or None if the request fails."""
    try:
        async with http.get(url) as response:
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
