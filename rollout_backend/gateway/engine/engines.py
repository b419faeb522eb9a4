"""Track the engines behind a router and their load, select one for calls that bypass the router, and pause all calls.

A router re-encodes the body of `/generate` and keeps only the fields it knows. sglang-router 0.3.2 and smg 1.13.0
drop `structural_tag` and `logit_bias`; sglang-router also drops `return_prompt_token_ids` and
`return_routed_experts`. Calls that need one of these fields bypass the router, and so do all calls to vLLM: its token
endpoint is a 404 there. The router's `/workers` lists the engines; each reports its load at `/v1/loads`, because
sglang-router's own `/get_loads` uses a page that SGLang 0.5.23 no longer has.

Invariants:

- All direct calls of a session go to the same engine while the router lists it, to hit its prefix cache.
- If no engine is known, the call goes to the router.
- An engine that does not report its load only causes one log line.
- Once `EngineCalls.pause` has returned, no request to an engine is in flight, and none begins before `resume`.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from rollout_backend.gateway.admission import EngineLoad

logger = logging.getLogger(__name__)

_DROPPED = frozenset({"structural_tag", "logit_bias"})
_POLL_S = 2.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_RESTART_S, _RESTART_POLL_S = 5.0, 0.2
_T = TypeVar("_T")


class CallsPaused(Exception):
    """Raised when a pause interrupts a call."""


class EngineCalls:
    """The calls from one gateway process to its engines, which a trainer pauses while it uses their memory."""

    def __init__(self, *, paused: bool = False) -> None:
        self._resumed = asyncio.Event()
        if not paused:
            self._resumed.set()
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    def resume(self) -> None:
        self._resumed.set()

    async def pause(self) -> None:
        """Cancel all requests to engines, and return when they have ended."""
        self._resumed.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def wait(self) -> None:
        """Wait until calls are not paused."""
        await self._resumed.wait()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and return its result.

        Raises:
            CallsPaused: calls are paused, or were paused while `work` ran; `work` was cancelled.
        """
        if self.paused:
            work.close()
            raise CallsPaused
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise CallsPaused from None


class Engines:
    """The engines behind one router. `EngineLoadPoller` updates `urls`; `calls` are this process's calls to all of
    them. With `all_calls_direct`, every call bypasses the router."""

    def __init__(self, calls: EngineCalls | None = None, all_calls_direct: bool = False) -> None:
        self.urls: Collection[str] = ()
        self.calls = calls or EngineCalls()
        self._all_calls_direct = all_calls_direct

    def for_direct_call(
        self, params: Mapping[str, Any], routing_key: str, failed: Collection[str] = ()
    ) -> str | None:
        """Return the engine for a call with these sampling parameters, or None to use the router.

        An engine in `failed` is selected only if all engines are in it.
        """
        if not (self._all_calls_direct or _DROPPED & params.keys()):
            return None
        ranked = sorted(self.urls, key=lambda url: hashlib.blake2b(f"{routing_key} {url}".encode()).digest())
        return next((url for url in ranked if url not in failed), ranked[0] if ranked else None)


class _Rank(BaseModel):
    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int = 0
    num_used_tokens: int = 0  # tokens in the KV cache
    max_total_num_tokens: int = 0


class _Loads(BaseModel):
    loads: list[_Rank]  # one entry per data-parallel rank


class _Worker(BaseModel):
    url: str
    is_healthy: bool = True


class _Workers(BaseModel):
    workers: list[_Worker]


class EngineLoadPoller:
    """Polls the load of all engines behind `url`, a router or an engine, for `observe`. Updates `engines.urls`."""

    def __init__(
        self,
        url: str,
        observe: Callable[[Sequence[EngineLoad]], None],
        interval_s: float = _POLL_S,
        engines: Engines | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._observe = observe
        self._known = engines or Engines()
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
                "no engine has reported its load at /v1/loads (asked: %s): until one does, calls are bounded by "
                "gateway.max_concurrent_calls alone",
                ", ".join(engines),
            )

    async def _engines(self, http: aiohttp.ClientSession) -> list[str]:
        listed = await listed_engines(http, self._url)
        if listed is None:  # the router did not answer this time, or `url` is an engine
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


class RouterRestart:
    """Makes all calls of one gateway wait while the router at `url` restarts.

    sglang-router assigns each session to an engine at its first call and keeps the assignment. A restarted router
    registers its engines one after another, so without this wait the first one would get most sessions.
    """

    def __init__(self, url: str, engines: Engines) -> None:
        self._url = url
        self._engines = engines
        self.limit_s = _RESTART_S
        self.waiting: asyncio.Task[None] | None = None

    async def wait(self, http: aiohttp.ClientSession) -> None:
        """Wait until the router lists all engines that it listed before, for at most `limit_s`.

        Returns at once if no router is known at `url`.
        """
        before = frozenset(self._engines.urls)
        if not before - {self._url}:
            return
        if self.waiting is None or self.waiting.done():
            self.waiting = asyncio.create_task(self._wait(http, before))
        await asyncio.shield(self.waiting)

    async def close(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            await asyncio.gather(self.waiting, return_exceptions=True)

    async def _wait(self, http: aiohttp.ClientSession, before: frozenset[str]) -> None:
        try:
            async with asyncio.timeout(self.limit_s):
                while True:
                    if before.issubset(await listed_engines(http, self._url) or ()):
                        return
                    await asyncio.sleep(_RESTART_POLL_S)
        except TimeoutError:
            pass  # an engine may have been lost as well
