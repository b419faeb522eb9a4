"""sglang-router: one process in front of all engines, which keeps each session on the engine that has its prefix.

What must always hold: its URL stays the same for its whole life, and after `add` returned the engine gets requests.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

from rollout_backend.config import RouterConfig
from rollout_backend.errors import StartupError
from rollout_backend.process import ServerProcess, free_port, require_port

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - listened on, not connected to
_POLL_S = 0.05


def router_command(config: RouterConfig, port: int, prometheus_port: int, model_call_s: float) -> list[str]:
    """The command line of a router that listens on `port`. A model call takes `model_call_s` at most."""
    return [
        sys.executable,
        *("-m", "sglang_router.launch_router"),
        *("--host", config.host),
        *("--port", str(port)),
        *("--prometheus-host", "127.0.0.1"),
        *("--prometheus-port", str(prometheus_port)),  # its default is one fixed port for all
        *("--policy", config.policy),
        # A new session goes where the fewest requests are. At random some engine gets twice what another has; by
        # the number of sessions an engine that was started anew gets all of them.
        *("--assignment-mode", "min_load"),
        # The gateway gives up on a call after `model_call_s`; the default would hold on to a hung engine for 30 min.
        *("--request-timeout-secs", str(math.ceil(model_call_s))),
        # Quick tries elsewhere; the patient ones are the gateway's, which has a deadline for all of them together.
        *("--retry-max-retries", "3"),
        *("--retry-max-backoff-ms", "1000"),
        # A sick engine is let alone early and tried again soon: the fleet takes away the dead ones.
        *("--cb-failure-threshold", "5"),
        *("--cb-success-threshold", "1"),
        *("--cb-timeout-duration-secs", "10"),
        *("--health-check-interval-secs", "10"),
        *("--health-check-timeout-secs", "10"),
        *("--health-failure-threshold", "3"),
        *("--health-success-threshold", "1"),
        # Only engines that are healthy are added, so there is nothing to wait for.
        *("--worker-startup-timeout-secs", "10"),
        *("--worker-startup-check-interval", "1"),
        *("--shutdown-grace-period-secs", "2"),  # no session is open by then; the default drains for 3 min
        *("--log-level", "warn"),
    ]


class Router:
    """Enter it, or `start` and `stop` it. After a `start` that failed, `stop` it too."""

    def __init__(self, config: RouterConfig, log: Path, model_call_s: float = 300.0) -> None:
        self._config = config
        self._log = log
        self._model_call_s = model_call_s
        self._port = config.port
        self._process: ServerProcess | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://{_EVERYWHERE.get(self._config.host, self._config.host)}:{self._port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts it, or starts it again on the same port after it ended; it knows no engine then.

        Raises:
            StartupError: its port is taken, or it did not become healthy; the message carries the end of its log.
        """
        self._port = require_port(self._config.host, self._port, "the router", "router.port")
        metrics_port = next(port for port in iter(free_port, None) if port != self._port)
        argv = router_command(self._config, self._port, metrics_port, self._model_call_s)
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        self._process = ServerProcess("the router", argv, self._log)
        await self._process.start()
        await self._process.wait_healthy(self._alive, self._config.startup_timeout_s)

    async def wait(self) -> str:
        """Returns once it has ended, with how, and the end of its log."""
        assert self._process is not None, "not started"
        code = await self._process.wait()
        return f"ended with code {code}. {self._process.tail()}"

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def alive(self) -> bool:
        """Whether it answers. It does so without an engine too."""
        return self._http is not None and await self._alive()

    async def add(self, url: str, timeout_s: float = 30.0) -> None:
        """Makes it send requests to the engine at `url`. Does nothing if it already does.

        Raises:
            StartupError: the router did not take the engine; the message says why.
        """
        if url in await self.workers():
            return
        reply = await self._call("POST", "/workers", {"url": url})
        path = f"/workers/{reply['worker_id']}"
        deadline = time.monotonic() + timeout_s
        while True:
            worker = await self._call("GET", path, missing_ok=True)
            if worker.get("is_healthy"):
                return
            job = worker.get("job_status") or {}
            if job.get("status") == "failed":
                raise StartupError(f"the router did not take the engine {url}: {job.get('message')}")
            if time.monotonic() > deadline:
                raise StartupError(f"the router did not take the engine {url} within {timeout_s:g} s. {self._tail()}")
            await asyncio.sleep(_POLL_S)

    async def remove(self, url: str, timeout_s: float = 10.0) -> None:
        """Makes it send no request to `url` any more; those in flight may finish. Does nothing for an unknown one.

        Raises:
            StartupError: the router did not do so.
        """
        worker_id = (await self.workers()).get(url)
        if worker_id is None:
            return
        await self._call("DELETE", f"/workers/{worker_id}", missing_ok=True)
        deadline = time.monotonic() + timeout_s
        while url in await self.workers():
            if time.monotonic() > deadline:
                raise StartupError(f"the router kept the engine {url} for {timeout_s:g} s after it was told not to")
            await asyncio.sleep(_POLL_S)

    async def workers(self) -> dict[str, str]:
        """The engines that it sends requests to: URL to the router's own id."""
        reply = await self._call("GET", "/workers")
        return {worker["url"]: worker["id"] for worker in reply["workers"]}

    async def _alive(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get(f"{self.url}/liveness") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _call(self, method: str, path: str, body: object = None, *, missing_ok: bool = False) -> dict[str, Any]:
        assert self._http is not None, "not started"
        try:
            async with self._http.request(method, self.url + path, json=body) as response:
                if response.status == 404 and missing_ok:
                    return {}
                if response.status >= 400:
                    text = await response.text()
                    raise StartupError(f"the router answered {method} {path} with {response.status}: {text[:500]}")
                reply: dict[str, Any] = await response.json()
                return reply
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StartupError(
                f"the router did not answer {method} {path} ({error or type(error).__name__}). {self._tail()}"
            ) from None

    def _tail(self) -> str:
        return self._process.tail() if self._process is not None else ""
