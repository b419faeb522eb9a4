"""Call any server that implements the agent container's contract: a Kubernetes service, a container, a process.

A session is one invoke with the session's id in a header; `POST /stop` with the same header ends it. A server or
replica without that session answers 404 with `{"error": "SessionNotFound"}`. A server that cannot stop sessions is
refused at the start, unless the settings accept it.

Invariants:

- Redirects are not followed. A payload contains a session key, which must not reach another host.
- A refusal, redirect or page that does not have the form of an agent server comes from a proxy. It ends neither a
  rollout nor a session.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Self
from uuid import uuid4

import aiohttp

from agent_wrapper.shared.own_answers import AGENT_SERVER, is_page, own_answer
from rollout_backend.agents.runtimes.base import AgentRuntime, CleanupSpec, error_of_status
from rollout_backend.base import aws
from rollout_backend.config import HttpConfig
from rollout_backend.errors import (
    InvokeRejected,
    OutcomeUnknown,
    PreflightError,
    RuntimeCallError,
    RuntimeUnavailable,
)

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_STOP_S = 30.0
_Post = AbstractAsyncContextManager[aiohttp.ClientResponse]
# The wrapper's responses have some tens of bytes.
MAX_BYTES = 64 * 1024


class HttpRuntime(AgentRuntime):
    """An agent server, identified by its URL."""

    def __init__(self, config: HttpConfig, http: aiohttp.ClientSession) -> None:
        self._config = config
        self._url = config.url.rstrip("/")
        self._http = http

    @classmethod
    async def open(cls, config: HttpConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        timeout = aiohttp.ClientTimeout(sock_connect=config.connect_timeout_s, total=config.read_timeout_s)
        # One connection per invoke: on a kept connection, an invoke may be sent just as the server closes it. Its
        # outcome is then unknown and costs another attempt, which is more than another connection.
        connector = aiohttp.TCPConnector(limit=config.connections, force_close=True)
        # A load balancer's cookie would send all sessions to one server.
        cookies = aiohttp.DummyCookieJar()
        headers = _headers(config)
        return cls(
            config,
            aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers, cookie_jar=cookies),
        )

    async def check(self, session_s: float = 0.0) -> None:
        try:
            async with self._http.get(f"{self._url}/ping", allow_redirects=False) as reply:
                if 300 <= reply.status < 400:
                    raise PreflightError(_redirected(reply))
                if reply.status != 200:
                    raise PreflightError(
                        f"{self._url}/ping answers {reply.status}: runtime.url must be the root of an agent server "
                        "that is wrapped in RolloutApp"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PreflightError(
                f"no agent server answers at {self._url} ({error}): start it, or correct runtime.url"
            ) from error

        if self._config.can_stop:
            await self._check_stop()

    async def _check_stop(self) -> None:
        """Stop a session that does not exist. An overload error proves nothing about stops, so it passes."""
        session_id = f"preflight-{uuid4()}"
        try:
            async with self._post("/stop", session_id) as reply:
                body = await aws.read_up_to(reply, MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise PreflightError(f"{self._url}/stop is not answered ({why}): see the server's log") from error
        if reply.status in (401, 403):
            raise PreflightError(
                f"{self._url} answers {reply.status}: set runtime.token to the server's $ROLLOUT_AGENT_TOKEN"
            )
        if reply.status in (405, 501) or (reply.status == 404 and not _is_session_not_found(body)):
            raise PreflightError(
                f"{self._url}/stop answers {reply.status}, so this server cannot stop sessions: serve the agent with "
                "the current agent_wrapper, or set runtime.can_stop=false to let agents continue until their deadline"
            )

    def limits(self) -> HttpConfig:
        return self._config

    def describe(self) -> dict[str, str]:
        return {"url": self._config.url}

    def log_location(self, session_id: str | None) -> str:
        return f"the log of the agent server at {self._config.url}"

    def cleanup_spec(self) -> CleanupSpec | None:
        if not self._config.can_stop:
            return None
        options = {"url": f"{self._url}/stop", "headers": _headers(self._config)}
        return CleanupSpec("rollout_backend.agents.runtimes.http.session_stopper", options)

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        try:
            async with self._post("/invocations", session_id, payload) as reply:
                body = await read_answer(reply)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RuntimeUnavailable(f"the agent server cannot be reached: {error}", never_opened=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise OutcomeUnknown(f"the invoke was cut off: {str(error) or type(error).__name__}") from error
        if reply.status not in (200, 202) or is_page(body):
            raise _to_call_error(reply, body)
        return body

    async def stop(self, session_id: str) -> None:
        if not self._config.can_stop:
            return
        try:
            async with self._post("/stop", session_id) as reply:
                body = await aws.read_up_to(reply, MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OutcomeUnknown(f"the stop was not answered: {str(error) or type(error).__name__}") from error
        if reply.status >= 500 and reply.status != 501:
            # Unlike an invoke, a stop can be repeated.
            raise RuntimeUnavailable(f"{reply.status}: {_shown(body)}")
        _raise_unless_stopped(reply, body)

    def _post(self, path: str, session_id: str, payload: bytes | None = None) -> _Post:
        headers, limit_s = {SESSION_HEADER: session_id}, self._config.read_timeout_s
        if payload is not None:
            headers["Content-Type"] = "application/json"
            limit_s = self._config.invoke_timeout_s
        timeout = aiohttp.ClientTimeout(sock_connect=self._config.connect_timeout_s, total=limit_s)
        url = self._url + path
        return self._http.post(url, data=payload, headers=headers, allow_redirects=False, timeout=timeout)

    async def aclose(self) -> None:
        await self._http.close()


def _headers(config: HttpConfig) -> dict[str, str]:
    return {} if config.token is None else {"Authorization": f"Bearer {config.token.get_secret_value()}"}


def _redirected(reply: aiohttp.ClientResponse) -> str:
    place = reply.headers.get("Location", "")[:500]
    return f"{reply.url} redirects to {place!r}: redirects are not followed, so set runtime.url to the final address"


def _shown(body: bytes) -> str:
    return body[:500].decode(errors="replace")


def _raise_unless_stopped(reply: aiohttp.ClientResponse, body: bytes) -> bool:
    """Return whether a stop has ended a session: False if there was none. Raises RuntimeCallError otherwise."""
    if reply.status == 404 and _is_session_not_found(body):
        return False
    if reply.status >= 300 or is_page(body):
        raise _to_call_error(reply, body)
    return True


def _to_call_error(reply: aiohttp.ClientResponse, body: bytes) -> RuntimeCallError:
    text = f"{reply.status}: {_shown(body)}"
    if reply.status < 500 and reply.status not in (408, 429) and own_answer(body, AGENT_SERVER) is None:
        if 300 <= reply.status < 400:
            text = _redirected(reply)
        return RuntimeUnavailable(f"the answer is not an agent server's, but a proxy's: {text}")
    # A server answers its agent's failure with 500. A proxy in front of it, or an overloaded server, sends others.
    if reply.status in (401, 402, 403, 408, 409, 429, 502, 503, 504):
        return error_of_status(reply.status, text)
    return InvokeRejected(text, reason="container_error")


def _is_session_not_found(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["error"] == "SessionNotFound")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that stops one session and returns False if it did not exist. See `CleanupSpec`."""

    async def stop(session_id: str) -> bool:
        headers, timeout = {**options["headers"], SESSION_HEADER: session_id}, aiohttp.ClientTimeout(total=_STOP_S)
        call = aiohttp.request("POST", options["url"], headers=headers, timeout=timeout, allow_redirects=False)
        async with call as reply:
            return _raise_unless_stopped(reply, await aws.read_up_to(reply, MAX_BYTES))

    return lambda session_id: asyncio.run(stop(session_id))


async def read_answer(reply: aiohttp.ClientResponse) -> bytes:
    """Return the first `MAX_BYTES` of a container's response to an invoke, even if the container sends more.

    A response that may be truncated raises an error, so that its outcome counts as unknown instead of being misread.

    Raises:
        aiohttp.ClientError: the connection was lost in the middle of the body.
        ConnectionError: the body has no declared length and is not a complete JSON value.
    """
    body = await aws.read_up_to(reply, MAX_BYTES)
    framed = "Content-Length" in reply.headers or reply.headers.get("Transfer-Encoding", "").lower() == "chunked"
    if not framed and not _is_json(body):
        raise ConnectionError(f"the answer has no Content-Length, and may have been cut: {body[:200]!r}")
    return body


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True
