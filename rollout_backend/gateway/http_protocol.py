"""Limit what a connection can hold before its first complete request, when no key is known yet.

Invariants:

- The head of a request arrives within `HEAD_S` and has at most `MAX_HEAD_BYTES` plus the size of one read. The same
  limits apply to the frames and trailers of a chunked body.
- When all connections are in use, a new one replaces the connection that has waited longest for its first request, or
  else the one that has been idle longest.

uvicorn's parser enforces neither limit.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout_backend.errors import ConfigError
from rollout_backend.gateway.sessions.journal import OPEN_FILES

HEAD_S = 5.0
KEEP_ALIVE_S = 4200  # longer than any load balancer's, so that none reuses a connection that this side is closing
MAX_HEAD_BYTES = 64 * 1024
_FRAME_BYTES = 16  # framing allowed per byte of content in a chunked body
_MAX_CONNECTIONS = 65_536
_FILES_OF_A_CALL = 3  # a connection of the agent, one to the engine, and one that an agent keeps open when idle
_OTHER_FILES = 256 + OPEN_FILES
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def needed_files(calls: int) -> int:
    """Return the number of open files that a gateway needs for this many concurrent calls."""
    return calls * _FILES_OF_A_CALL + _OTHER_FILES


def allow_files(calls: int) -> None:
    """Raise this process's limit on open files to what this many concurrent calls need. A shell's default is 1024.

    Raises:
        ConfigError: the hard limit is lower.
    """
    needed = needed_files(calls)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"gateway.max_concurrent_calls={calls} takes {needed} open files, and this machine allows a process "
            f"{hard}: raise that (`ulimit -Hn`), or lower the setting and raise gateway.processes"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def max_connections(calls: int) -> int:
    """Return the number of connections that fit into this process's limit on open files, besides those to engines."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, soft - _OTHER_FILES - calls)


def bounded_protocol(connections: int, head_s: float = HEAD_S) -> type[HttpToolsProtocol]:
    """Return a server protocol that keeps at most this many connections."""
    new: dict[BoundedProtocol, None] = {}  # connections without a request so far, oldest first
    idle: dict[BoundedProtocol, None] = {}  # connections kept open after a response

    class BoundedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._head_bytes = 0
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            new[self] = None
            self._expect_head()
            if len(self.connections) > connections:
                next(iter(new if len(new) > 1 else idle or new)).transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._received_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            if self in idle and self._deadline is None:  # a further request on this connection begins
                self._expect_head()
            super().data_received(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_TOO_LARGE)
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._head_bytes = 0
            self._received_head()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head_bytes = max(0, self._head_bytes - (1 + _FRAME_BYTES) * len(body))
            super().on_body(body)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.pipeline and not self.transport.is_closing():
                idle[self] = None

        def _expect_head(self) -> None:
            self._deadline = self.loop.call_later(head_s, self.transport.abort)

        def _received_head(self) -> None:
            new.pop(self, None)
            idle.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
