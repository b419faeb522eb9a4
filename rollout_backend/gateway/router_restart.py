"""Hold retries back while a router restarts, until it has its engines again.

sglang-router assigns a session to an engine at the session's first call, for as long as the session lives. A
restarted router gets its engines one after another, so without this wait the first engine would get many sessions.
"""

from __future__ import annotations

import asyncio

import aiohttp

from rollout_backend.gateway.direct_routing import DirectRouting
from rollout_backend.gateway.engine_load_poller import listed_engines

_LIMIT_S = 5.0
_INTERVAL_S = 0.2


class RouterRestart:
    """The wait of all calls of one gateway for the router at `url`."""

    def __init__(self, url: str, engines: DirectRouting) -> None:
        self._url = url
        self._engines = engines
        self.limit_s = _LIMIT_S
        self.waiting: asyncio.Task[None] | None = None

    async def wait(self, http: aiohttp.ClientSession) -> None:
        """Wait until the router lists all engines that it listed before, and at most `limit_s`.

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
                    await asyncio.sleep(_INTERVAL_S)
        except TimeoutError:
            pass  # an engine may have been lost as well
