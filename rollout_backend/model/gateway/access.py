"""Limit what a connection can hold before a key is known, and check the keys that requests carry.

uvicorn's parser limits neither the size nor the time of a request's head. Session keys are accepted in
`Authorization: Bearer`, in `x-api-key`, in paths and, in their short form, as a trajectory's id. A revoked key stays
valid here, because the registry refuses its session.

Invariants:

- The head of a request has at most `MAX_HEAD_BYTES` plus the size of one read. The same limit applies to the frames
  and trailers of a chunked body. It has at most `_MAX_HEADERS` fields. `WaitingConnections` limits its time, and the
  number of connections; `ConnectionPace` limits the CPU time of those that do not show a session's key.
- A connection has at most `_MAX_PIPELINED` requests waiting for their turn: uvicorn would parse and keep any number.
- Keys and secrets are never logged. Behind `PathKeys`, no path contains a key, so no log, error, trace or journal can
  contain one.
"""

from __future__ import annotations

import hmac
import re
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout_backend.base.connection_pace import ConnectionPace, PacedProtocol
from rollout_backend.base.logs import bind_log_fields
from rollout_backend.base.waiting_connections import (
    MAX_CONNECTIONS,
    WaitingConnections,
    raise_file_limit,
)
from rollout_backend.core.session_key import KeyRefused, SessionClaims, expand, shard_of, verify
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.sessions.journal_folder import OPEN_FILES, check_journal
from rollout_backend.model.model_call import ApiError

# Longer than any load balancer's, so that none reuses a connection that this side is closing.
KEEP_ALIVE_S = 4200
MAX_HEAD_BYTES = 64 * 1024
# Reading more would take the event loop milliseconds. Clients and proxies send some dozens.
_MAX_HEADERS = 256
# Today's clients and proxies send no request before the answer to the last.
_MAX_PIPELINED = 64
# Framing allowed per byte of content in a chunked body.
_FRAME_BYTES = 16
# A session has one connection with its call, which may wait, and one that its agent keeps open when idle.
_CONNECTIONS_EACH = 2
_OTHER_FILES = 256 + OPEN_FILES
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_UPGRADE = re.compile(rb"^upgrade(?=\s*:)", re.IGNORECASE | re.MULTILINE)
_SLASHES = re.compile("//+")
_KEY_PATH = re.compile(r"/k/([A-Za-z0-9._-]+)(/v1(?:/.*)?)", re.DOTALL)
_KEY = re.compile(rb"\s*([A-Za-z0-9._-]+)")
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
TRAJECTORY_HEADER = "x-amzn-sagemaker-trajectory-id"
"""The header in which agents for SageMaker's job runtime name the trajectory of a call. Its value is a short key."""
_BEFORE_KEYS = (b"bearer ", b"x-api-key:", b"/k/", f"{TRAJECTORY_HEADER}:".encode())


def needed_files(calls: int, sessions: int = 0) -> int:
    """Return how many open files a gateway needs for this many concurrent calls and connected sessions."""
    return calls + max(_CONNECTIONS_EACH * sessions, 2 * calls) + _OTHER_FILES


def allow_files(calls: int) -> None:
    """Raise this process's limit on open files as far as is useful. A shell's default is 1024.

    Raises:
        ConfigError: the hard limit is below what this many concurrent calls need.
    """
    needed = needed_files(calls)
    if (allowed := raise_file_limit(MAX_CONNECTIONS + calls + _OTHER_FILES)) < needed:
        raise ConfigError(
            f"gateway.max_concurrent_calls={calls} takes {needed} open files, and this machine allows a process "
            f"{allowed}: raise that (`ulimit -Hn`), or lower the setting and raise gateway.processes"
        )


def max_connections(calls: int) -> int:
    """Return the number of connections that fit into this process's limit on open files, besides those to engines."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - _OTHER_FILES - calls
    return max(16, min(files, MAX_CONNECTIONS))


def bounded_protocol(connections: int, **limits: float) -> type[HttpToolsProtocol]:
    """Return a server protocol that keeps at most this many connections; `limits` go to `WaitingConnections`."""

    class BoundedProtocol(PacedProtocol, HttpToolsProtocol):
        waiting = WaitingConnections(connections, **limits)

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._head_bytes = 0
            self._in_body = False

        def data_received(self, data: bytes) -> None:
            pace, began_s = self.pace, time.thread_time() if self.pace else 0.0
            if pace is not None and not self._head_bytes and pace.recognizes(data):
                pace = self.pace = None
            self._head_bytes += len(data)
            self.waiting.received(self.transport)
            if not self._in_body:
                # httptools drops the body of a request that offers another protocol, as Java's client does (HTTP/2).
                end = data.find(b"\r\n\r\n")
                head = data[: len(data) if end < 0 else end]
                # The expression takes .4 ms for 48 KB.
                if b"upgrade" in head.lower():
                    data = _UPGRADE.sub(b"x-upgrade", head) + data[len(head) :]
            super().data_received(data)
            if pace is not None:
                pace.charge(time.thread_time() - began_s)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_TOO_LARGE)
                self.transport.close()

        def on_header(self, name: bytes, value: bytes) -> None:
            if len(self.headers) >= _MAX_HEADERS:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                # This ends the parser.
                raise ConnectionError("a head has too many headers")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._head_bytes = 0
            self._in_body = True
            self.pace = None
            self.waiting.request_began(self.transport)
            super().on_headers_complete()
            if len(self.pipeline) > _MAX_PIPELINED:
                self.transport.abort()
                # This ends the parser.
                raise ConnectionError("too many requests wait on this connection")

        def on_body(self, body: bytes) -> None:
            self._head_bytes = max(0, self._head_bytes - (1 + _FRAME_BYTES) * len(body))
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.pipeline or self.transport.is_closing():
                self.waiting.request_ended(self.transport)

    return BoundedProtocol


class PacedServer(uvicorn.Server):
    """A server with a `bounded_protocol`, whose new connections wait for their turn."""

    def __init__(self, config: uvicorn.Config, is_known: Callable[[bytes], bool] = lambda _: False) -> None:
        super().__init__(config)
        self._is_known = is_known

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        bounded: Any = self.config.http_protocol_class
        protocol = partial(bounded, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        self._pace = ConnectionPace(bounded.waiting, protocol, self._is_known, self.config.ssl)
        for each in self.servers:
            self._pace.listen(each)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pace.close()
        await super().shutdown(sockets)


# --- keys -----------------------------------------------------------------------------------------------------


class PathKeys:
    """ASGI middleware that takes session keys from URLs, for agents that hard-code an API key or send none, and from
    `TRAJECTORY_HEADER`. Agents that send it authenticate with AWS credentials, which say nothing here.

    It also removes superfluous slashes: a redirect would lose the key, and the prefix or the TLS of a proxy.
    /k/KEY/v1/... is served as /v1/... with the session key KEY, which replaces any key in the headers. Unless
    `enabled`, the path is not found.
    """

    def __init__(self, app: ASGIApp, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, headers = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/", scope["headers"]
            if found := _KEY_PATH.fullmatch(path):
                key, path = found.groups()
                if self._enabled:
                    headers = _with_key(headers, key)
                else:
                    path = f"/k/...{path}"
            elif short := dict(headers).get(TRAJECTORY_HEADER.encode()):
                headers = _with_key(headers, expand(short.decode("latin-1")))
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(scope, receive, send)


def _with_key(headers: Iterable[tuple[bytes, bytes]], key: str) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name not in _KEY_HEADERS]
    return [*others, (b"authorization", b"Bearer " + key.encode("latin-1"))]


def keys_in(head: bytes) -> Iterator[str]:
    """Yield what may be session keys in the first bytes of a head, which need not be complete."""
    lowered = head.lower()
    for before in _BEFORE_KEYS:
        at = lowered.find(before)
        if at >= 0 and (found := _KEY.match(head, at + len(before))):
            yield expand(found[1].decode()) if before == _BEFORE_KEYS[-1] else found[1].decode()


class Authenticator:
    """Checks session keys and the control key of one gateway."""

    def __init__(self, settings: GatewaySettings, journal_id: str) -> None:
        self._settings = settings
        self._journal_id = journal_id

    def session(self, request: Request) -> SessionClaims:
        """Return the claims of the request's session key.

        Later log lines of this request name the session.

        Raises:
            ApiError: status 401 if the key is not valid, 421 if its session belongs to another gateway, 410 if the
                journal of its session is lost.
        """
        # Anthropic's clients send both headers if ANTHROPIC_AUTH_TOKEN is set too, for example in an agent's image.
        key, other = _bearer(request), request.headers.get("x-api-key", "")
        return self.claims(key or other, other or key)

    def claims(self, key: str, other: str) -> SessionClaims:
        """Return the claims of a session key; if it is not valid, of the `other`. Raises as `session`."""
        try:
            try:
                claims = self.verify(key)
            except KeyRefused:
                claims = self.verify(other)
        except KeyRefused as error:
            advice = "use the api_key of this rollout's request, or set gateway.key_in_path for agents that cannot"
            raise ApiError(401, f"{error}; {advice}", code="invalid_api_key") from None
        shard, shards = self._settings.shard, self._settings.gateway.processes
        if (owner := shard_of(claims.session_id, shards)) != shard:
            raise ApiError(
                421,
                f"this is gateway {shard} of {shards}, and the session belongs to gateway {owner} of {shards}: use "
                "the base_url of this rollout's request as it is",
                code="wrong_shard",
            )
        check_journal(claims, self._journal_id)
        bind_log_fields(run=claims.run_id, step=claims.step, rollout=claims.rollout_id, session=claims.session_id)
        return claims

    def verify(self, key: str) -> SessionClaims:
        """Return the claims of a session key, which may be another gateway's. Raises KeyRefused."""
        return verify(self._settings.secret, key, time.time(), self._settings.previous_secret)

    def has_control_key(self, request: Request) -> bool:
        return self.is_control_key(_bearer(request))

    def is_control_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._settings.control_key.encode())

    def require_control_key(self, request: Request) -> None:
        """Raise ApiError (401) if the request does not carry the control key."""
        if not self.has_control_key(request):
            raise ApiError(401, "this needs the control key", code="invalid_control_key")


def _bearer(request: Request) -> str:
    """Return the bearer token of a request, or an empty string."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
