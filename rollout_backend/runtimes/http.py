"""Any server with the agent container's contract: a Kubernetes service, a container, a process.

A session is one invoke that carries its id in a header; `POST /stop` with the same header ends it. A server without
that route, or a replica that does not have the session, answers 404. The agent then continues, but the step has
revoked its session key, so it samples nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import aiohttp

from rollout_backend.config import HttpConfig
from rollout_backend.errors import (
    InvokeRejected,
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.runtimes.answer import read_answer
from rollout_backend.runtimes.base import AgentRuntime

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"


class HttpRuntime(AgentRuntime):
    """An agent server, by its URL."""

    def __init__(self, config: HttpConfig, http: aiohttp.ClientSession) -> None:
        self._config = config
        self._url = config.url.rstrip("/")
        self._http = http

    @classmethod
    async def open(cls, config: HttpConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        timeout = aiohttp.ClientTimeout(sock_connect=config.connect_timeout_s, total=config.read_timeout_s)
        # One connection per invoke: on a kept connection, an invoke may be sent just as the server closes it. Its
        # outcome is then unknown and costs another attempt, which is more than another connection.
        connector = aiohttp.TCPConnector(limit=min(256, config.max_sessions), force_close=True)
        return cls(config, aiohttp.ClientSession(timeout=timeout, connector=connector))

    async def check(self, session_s: float = 0.0) -> None:
        try:
            async with self._http.get(f"{self._url}/ping") as reply:
                if reply.status != 200:
                    raise PreflightError(
                        f"{self._url}/ping answers {reply.status}: runtime.url must be the root of an agent server "
                        "that is wrapped in RolloutApp"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PreflightError(
                f"no agent server answers at {self._url} ({error}): start it, or correct runtime.url"
            ) from error

    def limits(self) -> HttpConfig:
        return self._config

    def describe(self) -> dict[str, str]:
        return {"url": self._config.url}

    def log_location(self, session_id: str | None) -> str:
        return f"the log of the agent server at {self._config.url}"

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        headers = {"Content-Type": "application/json", SESSION_HEADER: session_id}
        try:
            async with self._http.post(f"{self._url}/invocations", data=payload, headers=headers) as reply:
                body = await read_answer(reply)
        except aiohttp.ClientConnectorError as error:
            raise RuntimeUnavailable(f"the agent server cannot be reached: {error}", never_opened=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise OutcomeUnknown(f"the invoke was cut off: {error or type(error).__name__}") from error
        text = f"{reply.status}: {body[:500].decode(errors='replace')}"
        match reply.status:
            case 200 | 202:
                return body
            case 429:
                raise Throttled(text)
            case 402:
                raise QuotaExceeded(text)
            case 409:
                raise RuntimeConflict(text)
            case 502 | 503 | 504:  # from a proxy in front of the server, or from a server that is full
                raise RuntimeUnavailable(text, refused=reply.status == 503)
            case _:
                raise InvokeRejected(text, reason="container_error")

    async def stop(self, session_id: str) -> None:
        try:
            async with self._http.post(f"{self._url}/stop", headers={SESSION_HEADER: session_id}) as reply:
                text = f"{reply.status}: {(await reply.content.read(500)).decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeUnavailable(f"the stop was not answered: {error or type(error).__name__}") from error
        match reply.status:
            case status if status < 300 or status in (404, 405, 501):  # the session or the route does not exist
                return
            case 429:
                raise Throttled(text)
            case 409:
                raise RuntimeConflict(text)
            case status if status >= 500:
                raise RuntimeUnavailable(text)
            case _:
                raise InvokeRejected(text)

    async def aclose(self) -> None:
        await self._http.close()
