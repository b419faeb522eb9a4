"""Serve the list of engines to gateways that select an engine themselves, because no router forwards their calls.

vLLM's token endpoint passes no router: sglang-router and smg answer it with 404. So this takes the router's place:
gateways read the engines from `/workers`, as from a router, and send each call directly to one of them.

Invariants:

- The URL never changes.
- `/workers` lists the engines that were added and not removed. A model call that arrives here gets 503, so it is
  retried: the gateway knows no engine yet.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from rollout_backend.config import RouterConfig
from rollout_backend.serving.router import local_address
from rollout_backend.serving.server_process import require_port


class EngineDirectory:
    """An `EngineRouter` in this process. Start it and stop it."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._port = config.port
        self._urls: list[str] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{local_address(self._config.host)}:{self._port}"

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        """Raise StartupError if the port is taken."""
        self._port = require_port(self._config.host, self._port, "the list of engines", "router.port")
        app = web.Application()
        app.router.add_get("/workers", self._workers)
        app.router.add_route("*", "/{path:.*}", self._no_engine)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._port).start()

    async def wait(self) -> str:
        await asyncio.Event().wait()  # it ends with this process
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        self._urls.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def alive(self) -> bool:
        return self.running

    async def add(self, url: str) -> None:
        if url not in self._urls:
            self._urls.append(url)

    async def remove(self, url: str) -> None:
        if url in self._urls:
            self._urls.remove(url)

    async def _workers(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in self._urls]})

    async def _no_engine(self, _: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "the gateway knows no engine yet"}}, status=503)
