"""Track the engines behind a router and their load, select one for calls that bypass the router, and pause all calls.

A router re-encodes the body of `/generate` and keeps only the fields it knows. sglang-router 0.3.2 and smg 1.13.0
drop `structural_tag` and `logit_bias`; sglang-router also drops `return_prompt_token_ids` and
`return_routed_experts`. Calls that need one of these fields bypass the router. So does each call with a grammar,
because a router repeats it at other engines if it ends one. All calls to vLLM do, because routers answer its token
endpoint with 404. The router's `/workers` lists the engines; each reports its load at `/v1/loads`, because
sglang-router's own `/get_loads` uses a page that SGLang 0.5.23 no longer has.

Invariants:

- All direct calls of a session go to the same engine while the router lists it, to hit its prefix cache.
- A call that must bypass the router waits until the engines are known, and never reaches the router instead.
- An engine that does not report its load only causes one log line.
- A hung engine gets direct calls only if all engines hang. While one hangs, all calls bypass the router, which
  would keep sending sessions to it.
- Once `Engines.pause` has returned, no request to an engine is in flight, and none begins before `resume`.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from rollout_backend.core.adapter import NamedAdapter
from rollout_backend.model.gateway.cpu_shares import charged_task
from rollout_backend.model.gateway.stats import EngineLoad

logger = logging.getLogger(__name__)

_DIRECT = frozenset({"structural_tag", "json_schema", "logit_bias"})
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_RESTART_S, _RESTART_POLL_S = 5.0, 0.2
_T = TypeVar("_T")


class CallsPaused(Exception):
    """Raised when a pause interrupts a call."""


class NoEngineListed(Exception):
    """Raised when the router lists no healthy engine for a call that must bypass it."""


class Engines:
    """The engines behind `url`, a router or an engine, and the calls of one gateway process to them.

    `poll` updates `urls`; without it, `url` is treated as an engine. With `all_calls_direct`, every call bypasses the
    router.
    """

    def __init__(self, url: str, all_calls_direct: bool = False, *, paused: bool = False) -> None:
        self.url = url.rstrip("/")
        self.urls: Collection[str] = ()
        self.hung: set[str] = set()
        """Engines in `urls` that accept calls and answer none."""
        self._all_calls_direct = all_calls_direct
        self._listed: asyncio.Event | None = None
        self._read: Callable[[], Awaitable[None]] | None = None
        self._resumed = asyncio.Event()
        if not paused:
            self._resumed.set()
        self._running: set[asyncio.Task[Any]] = set()
        self.restart_limit_s = _RESTART_S
        self.restart: asyncio.Task[None] | None = None

    async def url_for(self, params: Mapping[str, Any], routing_key: str, failed: Collection[str] = ()) -> str:
        """Return the URL for a call with these sampling parameters: the router's, or an engine's if the router would
        drop some of them, reject the call, or retry a grammar that crashed an engine.

        An engine that hangs or is in `failed` is selected only if there is no other.

        Raises:
            NoEngineListed: the call must bypass the router, which lists no healthy engine.
        """
        if not (self._all_calls_direct or _DIRECT & params.keys() or self.hung.intersection(self.urls)):
            return self.url
        if self._listed is None:
            return self._ranked(routing_key, failed) or self.url
        await self._listed.wait()
        if url := self._ranked(routing_key, failed):
            return url
        raise NoEngineListed(f"the router at {self.url} lists no healthy engine")

    def _ranked(self, routing_key: str, failed: Collection[str]) -> str | None:
        def rank(url: str) -> tuple[bool, bool, bytes]:
            return url in self.hung, url in failed, hashlib.blake2b(f"{routing_key} {url}".encode()).digest()

        return min(self.urls, key=rank, default=None)

    # --- pauses, while a trainer uses the engines' memory ---------------------------------------------------

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

    async def wait_resumed(self) -> None:
        await self._resumed.wait()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work`, a request to an engine, and return its result.

        Raises:
            CallsPaused: calls are paused, or were paused while `work` ran; `work` was cancelled.
        """
        if self.paused:
            work.close()
            raise CallsPaused
        task = charged_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise CallsPaused from None

    # --- load -----------------------------------------------------------------------------------------------

    async def poll(self, observe: Callable[[Mapping[str, EngineLoad]], None], interval_s: float) -> NoReturn:
        """Update `urls`, and report the load of all engines to `observe`, until cancelled."""
        warned, self._listed = False, asyncio.Event()
        listing = self._listed
        async with aiohttp.ClientSession(timeout=_TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as http:

            async def read() -> None:
                nonlocal warned
                listed = await _listed_engines(http, self.url)
                if listed is not None:
                    self.urls = listed
                    listing.set()
                urls = [*self.urls]
                found = await asyncio.gather(*(_load(http, engine) for engine in urls))
                loads = {url: load for url, load in zip(urls, found, strict=True) if load is not None}
                if loads:
                    observe(loads)
                elif urls and not warned:
                    warned = True
                    logger.info(
                        "no engine has reported its load at /v1/loads (asked: %s): until one does, calls are bounded "
                        "by gateway.max_concurrent_calls alone",
                        ", ".join(urls),
                    )

            self._read = read
            while True:
                await read()
                await asyncio.sleep(interval_s)

    async def refresh(self) -> None:
        """Report the load of all engines now, if `poll` runs."""
        if self._read is not None:
            await self._read()

    # --- restarts of the router -----------------------------------------------------------------------------

    async def wait_for_router(self, http: aiohttp.ClientSession) -> None:
        """Wait until the router lists all engines that it listed before, for at most `restart_limit_s`.

        sglang-router assigns each session to an engine at its first call and keeps the assignment. A restarted router
        registers its engines one after another, so without this wait the first one would get most sessions. Returns
        at once if no router is known at `url`.
        """
        before = frozenset(self.urls)
        if not before - {self.url}:
            return
        if self.restart is None or self.restart.done():
            self.restart = asyncio.create_task(self._wait_for(http, before))
        await asyncio.shield(self.restart)

    async def _wait_for(self, http: aiohttp.ClientSession, before: frozenset[str]) -> None:
        try:
            async with asyncio.timeout(self.restart_limit_s):
                while True:
                    if before.issubset(await _listed_engines(http, self.url) or ()):
                        return
                    await asyncio.sleep(_RESTART_POLL_S)
        except TimeoutError:
            # An engine may have been lost as well.
            pass

    async def close(self) -> None:
        if self.restart is not None:
            self.restart.cancel()
            await asyncio.gather(self.restart, return_exceptions=True)


class AdapterVersions:
    """The newest version of each adapter that the trainer loads into its engines.

    A new attempt of a model call names the newest version that the trainer has announced.
    """

    def __init__(self, versions: Mapping[str, int] | None = None) -> None:
        self._versions = dict(versions or {})

    def replace(self, versions: Mapping[str, int]) -> None:
        """Set the newest version of every adapter."""
        self._versions = dict(versions)

    def newest(self, name: str) -> NamedAdapter | None:
        """Return the adapter as a call names it now; None without a name, which means the model's own weights.

        An adapter without a version was loaded by the engine's operator.
        """
        return NamedAdapter(name, self._versions.get(name)) if name else None


class _Rank(BaseModel):
    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    # Only training services report these: see `training.sampling_server`.
    is_service: bool = False
    given_up: dict[str, int] | None = None


class _Loads(BaseModel):
    loads: list[_Rank]


class _Worker(BaseModel):
    url: str
    is_healthy: bool = True


class _Workers(BaseModel):
    workers: list[_Worker]


async def _listed_engines(http: aiohttp.ClientSession, url: str) -> list[str] | None:
    """Return the router's healthy engines, or `url` itself if it is an engine; None if it does not answer."""
    try:
        async with http.get(f"{url}/workers") as response:
            if response.status >= 500:
                return None
            workers = _Workers.model_validate_json(await response.read()).workers
    except (aiohttp.ClientError, TimeoutError):
        return None
    except ValidationError:
        # An engine has no such page.
        return [url]
    return [worker.url for worker in workers if worker.is_healthy]


async def _load(http: aiohttp.ClientSession, engine: str) -> EngineLoad | None:
    """Return the load of an engine; None if it does not report it."""
    page = await _get(http, f"{engine}/v1/loads?include=core")
    try:
        ranks = _Loads.model_validate(page).loads
    except ValidationError:
        return None
    return EngineLoad(
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        free=sum(max(0, rank.max_running_requests - rank.num_running_reqs) for rank in ranks),
        kv_used=sum(rank.num_used_tokens for rank in ranks),
        kv_tokens=sum(rank.max_total_num_tokens for rank in ranks),
        is_service=any(rank.is_service for rank in ranks),
        given_up=next((rank.given_up for rank in ranks if rank.given_up is not None), None),
    )


async def _get(http: aiohttp.ClientSession, url: str) -> Any:
    """Return the page's JSON, or None if the request fails."""
    try:
        async with http.get(url) as response:
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
