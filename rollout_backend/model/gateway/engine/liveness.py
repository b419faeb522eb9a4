"""Find out whether an engine samples, although its server answers health checks.

A scheduler or a GPU can hang behind an HTTP server that accepts requests and reports health. Only sampling shows
that an engine works, and sampling one token is cheap. But an engine with a long queue also answers late, so an engine
whose counters move is never taken for hung.

Invariant: only silence counts. An engine that answers a probe with an error is not hung.
"""

import asyncio
import logging
import math
from typing import Any, Literal

import aiohttp
import orjson

from rollout_backend.base.logs import report_failure
from rollout_backend.model.gateway.engine.engines import CallsPaused, Engines
from rollout_backend.model.gateway.engine.protocol import EngineProtocol, EngineRequest

EngineState = Literal["hung", "busy", "sampling"]
_STATES: tuple[EngineState, ...] = ("hung", "busy", "sampling")

logger = logging.getLogger(__name__)

_PROBE_AGAIN_S = 10.0
_COUNTERS_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_ONE_TOKEN = EngineRequest([0], {"max_new_tokens": 1, "temperature": 0.0})


class SamplingProbe:
    """Probes one engine repeatedly."""

    def __init__(self, url: str, protocol: EngineProtocol) -> None:
        self._url = url
        self._protocol = protocol
        self._counters: Any = None

    async def state(self, http: aiohttp.ClientSession, timeout_s: float) -> EngineState:
        """Return "busy" if the engine's counters moved since the last probe or during this one, "sampling" if it
        answers a request for one token within `timeout_s`, or else "hung"."""
        if await self._have_moved(http):
            return "busy"
        body = orjson.dumps(self._protocol.body(_ONE_TOKEN), option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(timeout_s),
                http.post(self._url + self._protocol.path, data=body, headers=headers) as reply,
            ):
                await reply.read()
        except aiohttp.ClientError:
            return "hung"
        except TimeoutError:
            return "busy" if await self._have_moved(http) else "hung"
        return "sampling"

    async def _have_moved(self, http: aiohttp.ClientSession) -> bool:
        before = self._counters
        try:
            async with http.get(self._url + self._protocol.counters_path, timeout=_COUNTERS_TIMEOUT) as reply:
                self._counters = self._protocol.counters(await reply.read()) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError):
            self._counters = None
        return None not in (before, self._counters) and before != self._counters


class HangDetector:
    """Detects hung engines for the silent calls of one gateway, and keeps `engines.hung` current."""

    def __init__(
        self, engines: Engines, protocol: EngineProtocol, http: aiohttp.ClientSession, silence_s: float
    ) -> None:
        self._engines = engines
        self._protocol = protocol
        self._http = http
        self._silence_s = silence_s
        # By URL: the loop's time of the last answer to a call, and the time and result of the last probe.
        self._answered: dict[str, float] = {}
        self._probed: dict[str, tuple[float, EngineState]] = {}
        self._probes: dict[str, SamplingProbe] = {}
        self._running: dict[str, asyncio.Task[EngineState]] = {}
        self._recoveries: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        tasks = [*self._running.values(), *self._recoveries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def answered(self, url: str) -> None:
        """Note that the server at `url` sent tokens."""
        self._answered[url] = _now()
        self._engines.hung.discard(url)

    async def examine(self, url: str) -> EngineState:
        """Return the state of the engine that calls to `url` reach; "busy" also if it answers other calls.

        Behind a router, any of the engines may have a call: "hung" if one of them hangs, else "busy" if one is.
        """
        behind = [*self._engines.urls] if url == self._engines.url and self._engines.urls else [url]
        if len(behind) == 1 and self._answered.get(url, -math.inf) > _now() - self._silence_s:
            return "busy"
        return min(await asyncio.gather(*map(self._probe_once, behind)), key=_STATES.index)

    async def _probe_once(self, url: str) -> EngineState:
        """Probe an engine, once for all calls that ask within some seconds."""
        at, state = self._probed.get(url, (-math.inf, "hung"))
        if state != "hung" and at > _now() - _PROBE_AGAIN_S:
            return state
        running = self._running.get(url)
        if running is None or running.done():
            running = self._running[url] = asyncio.create_task(self._probe(url))
        return await asyncio.shield(running)

    async def _probe(self, url: str) -> EngineState:
        probe = self._probes.setdefault(url, SamplingProbe(url, self._protocol))
        try:
            state = await self._engines.run(probe.state(self._http, self._silence_s / 4))
        except CallsPaused:
            return "busy"
        self._probed[url] = _now(), state
        if state != "hung":
            self._engines.hung.discard(url)
        elif url in self._engines.urls and url not in self._engines.hung:
            logger.warning("%s answers no call and samples no token: calls go to other engines until it does", url)
            self._engines.hung.add(url)
            task = asyncio.create_task(self._recover(url))
            self._recoveries.add(task)
            task.add_done_callback(self._recoveries.discard)
            task.add_done_callback(report_failure(f"the watch of {url}"))
        return state

    async def _recover(self, url: str) -> None:
        try:
            while url in self._engines.hung and url in self._engines.urls:
                await asyncio.sleep(_PROBE_AGAIN_S)
                await self._probe_once(url)
        finally:
            self._engines.hung.discard(url)


def _now() -> float:
    return asyncio.get_running_loop().time()
