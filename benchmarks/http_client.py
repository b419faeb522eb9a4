"""A client's connection that costs 25 us of CPU per call: it reads the whole response before it looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


class Connection(asyncio.Protocol):
    """A kept connection. One request at a time."""

    transport: Any = None

    def __init__(self) -> None:
        self._read = bytearray()
        self._needed = 0  # bytes of the response, once its head is known; 0 for one in chunks
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def call(self, request: bytes) -> Awaitable[bytes]:
        """Return the whole response, head included."""
        self._read.clear()
        self._needed = 0
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._read += data
        if self._answer is not None and not self._answer.done() and self._is_whole():
            self._answer.set_result(bytes(self._read))

    def _is_whole(self) -> bool:
        if not self._needed:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(self._read[:end]).lower()
            if b"transfer-encoding: chunked" in head:
                return self._read.endswith(b"0\r\n\r\n")
            self._needed = end + 4 + int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return len(self._read) >= self._needed
