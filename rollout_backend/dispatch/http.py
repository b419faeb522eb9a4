"""Any server that speaks the agent container's contract: a Kubernetes service, a container, a process.

Such a server has no sessions of its own, so there is nothing to stop: an agent that is no longer wanted loses its
model endpoint, and ends with that.
"""

from __future__ import annotations

from typing import Self

import aiohttp

from rollout_backend.config import HttpConfig
from rollout_backend.errors import (
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    Rejected,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"


class HttpRuntime:
    def __init__(self, config: HttpConfig, http: aiohttp.ClientSession) -> None:
        self._url = config.url.rstrip("/")
        self._http = http

    @classmethod
    async def open(cls, config: HttpConfig) -> Self:
        timeout = aiohttp.ClientTimeout(sock_connect=config.connect_timeout_s, total=config.read_timeout_s)
        # Each invoke on a connection of its own: on a kept one it may go out just as the server closes it, and then
        # nobody knows whether it arrived. That costs another attempt, which is more than another connection.
        connector = aiohttp.TCPConnector(limit=min(256, config.max_sessions), force_close=True)
        return cls(config, aiohttp.ClientSession(timeout=timeout, connector=connector))

    async def check(self) -> None:
        try:
            async with self._http.get(f"{self._url}/ping") as reply:
                if reply.status != 200:
                    raise PreflightError(
                        f"{self._url}/ping answers {reply.status}: runtime.url must be the root of an agent server "
                        "that is wrapped in RolloutApp"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PreflightError(
                f"no agent server answers at {self._url} ({error}): start it, or mend runtime.url"
            ) from error

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        headers = {"Content-Type": "application/json", SESSION_HEADER: session_id}
        try:
            async with self._http.post(f"{self._url}/invocations", data=payload, headers=headers) as reply:
                body = await reply.read()
        except aiohttp.ClientConnectorError as error:
            raise RuntimeUnavailable(f"the agent server cannot be reached: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
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
            case 502 | 503 | 504:  # the proxy in front of it, or a server that is full
                raise RuntimeUnavailable(text)
            case _:
                raise Rejected(text, reason="container_error")

    async def stop(self, session_id: str) -> None:
        return

    async def aclose(self) -> None:
        await self._http.close()
