"""Limit the connections of a server that wait for a request, because strangers can open any number of them.

Invariants:

- The head of a request arrives within `head_s`, from the connection's start or the first byte of a further request.
- When all connections are in use, a new one replaces the connection that has waited longest for its first request, or
  else the one that has been idle longest.
"""

from __future__ import annotations

import asyncio
import resource

HEAD_S = 5.0
MAX_CONNECTIONS = 65_536  # each takes some 10 KB


def raise_file_limit(needed: int) -> int:
    """Raise this process's limit on open files to `needed`, or as far as allowed. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return needed if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


class WaitingConnections:
    """The connections of one server, by transport."""

    def __init__(self, limit: int, head_s: float = HEAD_S) -> None:
        self._limit, self._head_s = limit, head_s
        self._open: set[asyncio.Transport] = set()
        self._new: dict[asyncio.Transport, None] = {}  # without a request so far, oldest first
        self._idle: dict[asyncio.Transport, None] = {}  # kept open after a response, idle longest first
        self._deadlines: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def opened(self, connection: asyncio.Transport) -> None:
        self._open.add(connection)
        self._new[connection] = None
        self._expect_head(connection)
        if len(self._open) > self._limit:
            replaced = next(iter(self._new if len(self._new) > 1 else self._idle or self._new))
            self.closed(replaced)  # before the event loop says so, since others may be opened in the meantime
            replaced.abort()

    def received(self, connection: asyncio.Transport) -> None:
        """Expect a head, unless the data belong to the body of a request in progress."""
        if connection in self._idle and connection not in self._deadlines:
            self._expect_head(connection)

    def request_began(self, connection: asyncio.Transport) -> None:
        """Leave the connection alone: the head of a request is complete."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        if (deadline := self._deadlines.pop(connection, None)) is not None:
            deadline.cancel()

    def request_ended(self, connection: asyncio.Transport) -> None:
        if connection in self._open and not connection.is_closing():
            self._idle[connection] = None

    def closed(self, connection: asyncio.Transport) -> None:
        self.request_began(connection)
        self._open.discard(connection)

    def _expect_head(self, connection: asyncio.Transport) -> None:
        self._deadlines[connection] = asyncio.get_running_loop().call_later(self._head_s, connection.abort)
