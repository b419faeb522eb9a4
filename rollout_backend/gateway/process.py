"""The gateway as a process of its own, and what the backend asks of it."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp

from agent_wrapper.contract import ModelEndpoint
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ServingError
from rollout_backend.gateway.settings import GatewaySettings
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.gateway.tokens import SessionClaims, issue
from rollout_backend.process import ServerProcess, require_port

__all__ = ["GatewayProcess", "GatewayStats"]

_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=30)
_ANY_HOST = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  # compared with, not bound to


class GatewayProcess:
    """One gateway between agents and the engine (or router) at `engine_url`. Not restartable.

    `secret` signs the session keys: give one if keys must outlive this process. The default is random.
    """

    def __init__(self, config: RolloutConfig, engine_url: str, log: Path, secret: str | None = None) -> None:
        self._config = config
        self._engine_url = engine_url
        self._log = log
        self._secret = secret or secrets.token_urlsafe(48)
        self._control_key = secrets.token_urlsafe(48)
        self._url = ""
        self._process: ServerProcess | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Where this machine reaches it; empty before `start`."""
        return self._url

    @property
    def public_url(self) -> str:
        """Where agents reach it."""
        return (self._config.gateway.public_url or self._url).rstrip("/")

    async def start(self) -> None:
        """Starts it and waits until it is healthy.

        Raises:
            StartupError: its port is taken, or it did not come up; the message carries the end of its log.
        """
        config = self._config
        port = require_port(config.gateway.host, config.gateway.port, "the gateway", "gateway.port")
        settings = GatewaySettings(
            host=config.gateway.host,
            port=port,
            model=config.model,
            gateway=config.gateway,
            engine_url=self._engine_url,
            model_call_s=config.timeouts.model_call_s,
            token_s=config.timeouts.token_s,
            secret=self._secret,
            control_key=self._control_key,
        )
        host = "127.0.0.1" if config.gateway.host in _ANY_HOST else config.gateway.host
        self._url = f"http://{host}:{port}"
        self._http = aiohttp.ClientSession(timeout=_CONTROL_TIMEOUT)
        self._process = ServerProcess(
            "the gateway",
            [sys.executable, "-m", "rollout_backend.gateway"],
            self._log,
            stdin=settings.model_dump_json().encode(),
        )
        try:
            await self._process.start()
            await self._process.wait_healthy(self._healthy, config.gateway.startup_timeout_s)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends it. Does nothing if it never ran."""
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await self._process.stop()

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    def tail(self) -> str:
        """The end of its log, for an error message."""
        assert self._process is not None, "not started"
        return self._process.tail()

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        """The session's way to the model: its URL and the key that opens it."""
        base = f"{self.public_url}/v1"
        return ModelEndpoint(
            base_url=base,
            api_key=issue(self._secret, claims),
            name=self._config.model.served_name,
            trajectory_url=f"{base}/rollout/trajectory",
        )

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Closes these sessions: their calls are aborted, and their keys open nothing any more.

        Raises:
            ServingError: the gateway does not answer.
        """
        await self._control("POST", "/control/revoke", {"session_ids": list(session_ids)})

    async def stats(self) -> GatewayStats:
        """Raises ServingError if the gateway does not answer."""
        return GatewayStats.model_validate(await self._control("GET", "/control/stats"))

    async def _control(self, method: str, path: str, body: object = None) -> Any:
        if self._http is None or self._http.closed:
            raise ServingError("the gateway is not running")
        headers = {"Authorization": f"Bearer {self._control_key}"}
        try:
            async with self._http.request(method, self._url + path, json=body, headers=headers) as response:
                response.raise_for_status()
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServingError(f"the gateway does not answer {path}: {error!r}. Its log is {self._log}") from None

    async def _healthy(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get(self._url + "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
