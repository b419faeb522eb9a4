"""A client's connection that costs 25 us of CPU per call: it reads the whole response before it looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Self


class Connection(asyncio.Protocol):
    """A kept connection. One request at a time."""

    transport: Any = None

    def __init__(self) -> None:
        self._read = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def open(cls, host: str | None, port: int | None) -> Self:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def call(self, request: bytes) -> Awaitable[bytes]:
        """Return the whole response, head included."""
        self._read.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._read += data
        if self._answer is not None and not self._answer.done() and self._is_whole():
            self._answer.set_result(bytes(self._read))

    def _is_whole(self) -> bool:
        head, end, _ = bytes(self._read[:2000]).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            return self._read.endswith(b"0\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return bool(end) and len(self._read) >= len(head) + 4 + int(length)
