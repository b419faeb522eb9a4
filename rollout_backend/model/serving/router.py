"""Run sglang-router or smg, a process in front of all engines that keeps each session on the engine with its prefix.

smg is the successor of sglang-router, with the same options and interface. Comments mark the differences.

Invariants:

- The router's URL never changes, even after a restart.
- Once `add` has returned, the engine gets requests.
"""

import asyncio
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web

from rollout_backend.base.addresses import host_port, listen_addresses, local_address
from rollout_backend.config import RouterConfig
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.serving.engine import PROBE
from rollout_backend.model.serving.server_process import ServerProcess, free_port, require_port

_POLL_S = 0.05

# `sglang_router.launch_router` would import FastAPI, 0.6 s, for a load balancer that this package does not use.
_SGLANG_ROUTER = """
from argparse import ArgumentParser
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()
"""
_SMG_OPTIONS = (
    # By default, smg sends no request to an engine in which 8 requests wait or 80 % of the KV cache is used. Its
    # sessions would move to engines without their prefix.
    "--disable-worker-overload-protection",
    # Only the protection would use the loads.
    "--disable-load-monitoring",
    # By default, smg answers 429 above 4,096 requests, or 1,024 per core. `gateway.max_concurrent_calls` limits them.
    *("--max-concurrent-requests", "0"),
)
# smg lists engines with these statuses; sglang-router does not.
_NOT_ROUTED = frozenset({"pending", "draining"})


def check_installed(config: RouterConfig) -> None:
    """Raise ConfigError if the router is smg and the extra `smg` is not installed."""
    if config.kind == "smg" and importlib.util.find_spec("smg") is None:
        raise ConfigError(
            "router.kind=smg, and smg is not installed in this environment: install the extra smg (pip install "
            "'.[smg]'), or remove the setting"
        )


def router_command(
    config: RouterConfig, port: int, prometheus_port: int, model_call_s: float, health_check_s: int = 10
) -> list[str]:
    """Return the command line of a router that listens on `port`. A model call takes at most `model_call_s`."""
    return [
        sys.executable,
        *(("-m", "smg.launch_router") if config.kind == "smg" else ("-c", _SGLANG_ROUTER)),
        *("--host", f"[{config.host}]" if ":" in config.host else config.host),
        *("--port", str(port)),
        *("--prometheus-host", "127.0.0.1"),
        # By default, all routers would use the same port.
        *("--prometheus-port", str(prometheus_port)),
        *("--policy", config.policy),
        # A new session goes to the engine with the fewest requests. Assigned at random, some engine gets twice the
        # load of another; assigned by the number of sessions, a restarted engine gets every new session.
        *("--assignment-mode", "min_load"),
        # The gateway gives up a call after `model_call_s`; by default the router would wait 30 min for a hung engine.
        *("--request-timeout-secs", str(math.ceil(model_call_s))),
        # The router makes few quick retries on other engines. The gateway makes the slow ones, within one deadline.
        *("--retry-max-retries", "3"),
        *("--retry-max-backoff-ms", "1000"),
        # A failing engine is skipped early and retried soon; the fleet removes dead ones.
        *("--cb-failure-threshold", "5"),
        *("--cb-success-threshold", "1"),
        *("--cb-timeout-duration-secs", "10"),
        *("--health-check-endpoint", PROBE),
        *("--health-check-interval-secs", str(health_check_s)),
        *("--health-check-timeout-secs", "10"),
        *("--health-failure-threshold", "3"),
        *("--health-success-threshold", "1"),
        # Only healthy engines are added, so the router need not wait for them.
        *("--worker-startup-timeout-secs", "10"),
        *("--worker-startup-check-interval", "1"),
        # No session is open at shutdown, and the default drains for 3 min.
        *("--shutdown-grace-period-secs", "2"),
        *("--log-level", "warn"),
        *(_SMG_OPTIONS if config.kind == "smg" else ()),
    ]


class Router:
    """A router process. Enter it, or `start` and `stop` it. Call `stop` after a failed `start`, too."""

    def __init__(
        self, config: RouterConfig, log: Path, model_call_s: float = 300.0, health_check_s: int = 10
    ) -> None:
        """Raise ConfigError if the router's package is not installed."""
        check_installed(config)
        self._config = config
        self._log = log
        self._model_call_s = model_call_s
        self._health_check_s = health_check_s
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
        return f"http://{host_port(local_address(self._config.host), self._port)}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the router, or restart it on the same port after it ended. It starts without engines.

        Raises:
            StartupError: its port is taken, or it did not become healthy; the message includes the end of its log.
        """
        self._port = require_port(self._config.host, self._port, "the router", "router.port")
        metrics_port = next(port for port in iter(free_port, None) if port != self._port)
        argv = router_command(self._config, self._port, metrics_port, self._model_call_s, self._health_check_s)
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=10), cookie_jar=aiohttp.DummyCookieJar()
            )
        self._process = ServerProcess("the router", argv, self._log)
        await self._process.start()
        await self._process.wait_healthy(self._alive, self._config.startup_timeout_s, "router.startup_timeout_s")

    async def wait(self) -> str:
        """Wait until the router has ended. Return how it ended, with the end of its log."""
        assert self._process is not None, "not started"
        return await self._process.wait_ended()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def alive(self) -> bool:
        """Return whether the router answers, which it does even without engines."""
        return self._http is not None and await self._alive()

    async def add(self, url: str, timeout_s: float = 30.0) -> None:
        """Add the engine at `url` to the router. Does nothing if the router already has it.

        To detect its protocol, the router requests `/health` from a new engine, even if another health check endpoint
        is configured. The engine must therefore be able to generate at this moment.

        Raises:
            StartupError: the router did not accept the engine; the message says why.
        """
        if url in await self.workers():
            return
        deadline = time.monotonic() + timeout_s
        # smg refuses to add an engine again within 5 s of its removal.
        while any(worker["url"] == url for worker in await self._listed()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        reply = await self._call("POST", "/workers", {"url": url})
        path = f"/workers/{reply['worker_id']}"
        while True:
            worker = await self._call("GET", path, missing_ok=True)
            if worker.get("is_healthy"):
                return
            job = worker.get("job_status") or {}
            if job.get("status") == "failed":
                raise StartupError(f"the router did not take the engine {url}: {job.get('message')}")
            if not worker and self._config.kind == "smg":
                # smg forgets a failed job.
                raise StartupError(f"the router did not take the engine {url}. {await self._tail()}")
            if time.monotonic() > deadline:
                raise StartupError(
                    f"the router did not take the engine {url} within {timeout_s:g} s. {await self._tail()}"
                )
            await asyncio.sleep(_POLL_S)

    async def remove(self, url: str, timeout_s: float = 10.0) -> None:
        """Stop sending requests to `url`; requests in flight may finish. Does nothing for an unknown URL.

        Raises:
            StartupError: the router did not remove the engine in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                worker_id = (await self.workers()).get(url)
                if worker_id is None:
                    return
                await self._call("DELETE", f"/workers/{worker_id}", missing_ok=True)
                while url in await self.workers():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StartupError(f"the router did not remove the engine {url} within {timeout_s:g} s") from None

    async def workers(self) -> dict[str, str]:
        """Return the engines to which the router sends requests, as a map from URL to the router's id."""
        listed = await self._listed()
        return {worker["url"]: worker["id"] for worker in listed if worker.get("status") not in _NOT_ROUTED}

    async def _listed(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = (await self._call("GET", "/workers"))["workers"]
        return listed

    async def _alive(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get(f"{self.url}/liveness") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _call(self, method: str, path: str, body: object = None, *, missing_ok: bool = False) -> dict[str, Any]:
        if self._http is None or self._http.closed:
            raise StartupError("the router is not running")
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
                f"the router did not answer {method} {path} ({str(error) or type(error).__name__}). "
                f"{await self._tail()}"
            ) from None

    async def _tail(self) -> str:
        return await self._process.describe_log() if self._process is not None else ""


class EngineDirectory:
    """A replacement for the router, in this process, for gateways that select an engine themselves.

    No router forwards vLLM's token endpoint: sglang-router and smg answer it with 404. With this class, gateways
    read the engines from `/workers`, as from a router, and send each call directly to an engine. Its URL never
    changes. A model call that arrives here, from a gateway without engines, gets a 503 and is retried.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._port = config.port
        self._urls: list[str] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{host_port(local_address(self._config.host), self._port)}"

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        """Serve the list of engines. Raises StartupError if the port is taken."""
        self._port = require_port(self._config.host, self._port, "the list of engines", "router.port")
        app = web.Application()
        app.router.add_get("/workers", self._workers)
        app.router.add_route("*", "/{path:.*}", self._no_engine)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        for address in listen_addresses(self._config.host):
            await web.TCPSite(self._runner, address, self._port).start()

    async def wait(self) -> str:
        # The server ends with this process.
        while True:
            await asyncio.Event().wait()

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
