"""Limit the connections of a server that wait for their client, because strangers can open any number of them.

Invariants:

- The head of a request arrives within `head_s`, from the connection's start or the first byte of a further request.
- A client reads what was written to it within `read_s`, except for a small remainder.
- When all connections are in use, a new one replaces the connection that has waited longest for its first request, or
  else the one that has been idle longest, or else the one whose client has not read for longest.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Protocol, cast

HEAD_S = 5.0
# This is longer than a relay waits for its dialer.
READ_S = 300.0
# Each connection takes some 10 KB.
MAX_CONNECTIONS = 65_536


def raise_file_limit(needed: int) -> int:
    """Raise this process's limit on open files to `needed`, or as far as allowed. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return needed if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


class _Connection(Protocol):
    def abort(self) -> None: ...


class WaitingConnections:
    """The connections of one server: transports, and those that wait for one."""

    def __init__(self, limit: int, head_s: float = HEAD_S, read_s: float = READ_S) -> None:
        self._limit, self._head_s, self._read_s = limit, head_s, read_s
        self._open: set[_Connection] = set()
        # Connections without a request so far, oldest first.
        self._new: dict[_Connection, None] = {}
        # Connections kept open after a response, idle longest first.
        self._idle: dict[_Connection, None] = {}
        self._deadlines: dict[_Connection, asyncio.TimerHandle] = {}
        # Connections whose client does not read, unread longest first.
        self._unread: dict[_Connection, asyncio.TimerHandle] = {}

    def opened(self, connection: _Connection, head_s: float | None = None) -> None:
        self._open.add(connection)
        self._new[connection] = None
        self._expect_head(connection, head_s)
        if len(self._open) > self._limit:
            replaced = next(iter(self._new if len(self._new) > 1 else self._idle or self._unread or self._new))
            # The event loop reports the end later, and other connections may be opened in the meantime.
            self.closed(replaced)
            replaced.abort()

    def received(self, connection: _Connection) -> None:
        """Expect a head, unless the data belong to the body of a request in progress."""
        if connection in self._idle and connection not in self._deadlines:
            self._expect_head(connection)

    def request_began(self, connection: _Connection) -> None:
        """Leave the connection alone: the head of a request is complete."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        if (deadline := self._deadlines.pop(connection, None)) is not None:
            deadline.cancel()

    def request_ended(self, connection: _Connection) -> None:
        # The connection may be closing, and still have something to send.
        if connection in self._open:
            self._idle[connection] = None

    def writing_paused(self, connection: _Connection) -> None:
        if connection in self._open:
            self._unread[connection] = asyncio.get_running_loop().call_later(self._read_s, connection.abort)

    def writing_resumed(self, connection: _Connection) -> None:
        if (deadline := self._unread.pop(connection, None)) is not None:
            deadline.cancel()

    def closed(self, connection: _Connection) -> None:
        self.request_began(connection)
        self.writing_resumed(connection)
        self._open.discard(connection)

    def _expect_head(self, connection: _Connection, head_s: float | None = None) -> None:
        head_s = self._head_s if head_s is None else head_s
        self._deadlines[connection] = asyncio.get_running_loop().call_later(head_s, connection.abort)


class WatchedProtocol(asyncio.Protocol):
    """Base class of protocols whose connections `waiting` limits. Inherit from it before the server's class."""

    waiting: WaitingConnections
    connection: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connection = cast(asyncio.Transport, transport)
        self.waiting.opened(self.connection)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.waiting.closed(self.connection)
        super().connection_lost(cast(Exception, exc))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.waiting.writing_paused(self.connection)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.waiting.writing_resumed(self.connection)
