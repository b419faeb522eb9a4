"""A small HTTP/1.1 server with delayed answers. Each costs some 20 us of CPU, a tenth of what a framework takes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote


class Request:
    __slots__ = ("body", "headers", "method", "path", "query")

    def __init__(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, target, _ = first.split(" ")
        path, _, self.query = target.partition("?")
        self.path = unquote(path) if "%" in path else path
        self.headers: dict[str, str] = {}  # by names in lower case
        self.body = b""
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    def arguments(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))


@dataclass(slots=True)
class Response:
    status: int = 200
    body: tuple[bytes, ...] = (b"",)
    headers: str = ""  # each line ends in CRLF
    bodiless: bool = False  # to HEAD

    def parts(self) -> tuple[bytes, ...]:
        length = sum(map(len, self.body))
        head = f"HTTP/1.1 {self.status} x\r\nContent-Length: {length}\r\n{self.headers}\r\n".encode()
        return (head,) if self.bodiless else (head, *self.body)


def json_response(value: object, status: int = 200, headers: str = "") -> Response:
    content = "Content-Type: application/x-amz-json-1.0\r\nx-amzn-RequestId: 1\r\n"
    return Response(status, (json.dumps(value).encode(),), content + headers)


Answer = Callable[[Response | bytes, float], None]
"""Sends a response, or ready-made bytes of one, after a latency in seconds."""
Handler = Callable[[Request, Answer], None]


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection. `handle` answers each request."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._buffer = b""
        self._request: Request | None = None
        self._missing = 0  # bytes of the body; -1: it is chunked

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        if self._request is None and not self._read_head():
            return False
        request, body = self._request, self._take_body()
        assert request is not None
        if body is None:
            return False
        request.body = _decoded(body) if "aws-chunked" in request.headers.get("content-encoding", "") else body
        self._request = None
        self._handle(request, self._answer)
        return bool(self._buffer)

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return False
        if head.startswith(b"PRI "):  # a router's probe by HTTP/2
            self._transport.close()
            self._buffer = b""
            return False
        self._buffer, self._request = rest, Request(head)
        headers = self._request.headers
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._missing = -1 if chunked else int(headers.get("content-length", 0))
        if "expect" in headers:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _take_body(self) -> bytes | None:
        if self._missing < 0:
            body, end, rest = self._buffer.partition(b"0\r\n\r\n")
            if not end:
                return None
            self._buffer = rest
            return _decoded(body + b"0\r\n")
        if len(self._buffer) < self._missing:
            return None
        body, self._buffer = self._buffer[: self._missing], self._buffer[self._missing :]
        return body

    def _answer(self, response: Response | bytes, latency_s: float) -> None:
        if latency_s:
            self._loop.call_later(latency_s, self._send, response)
        else:
            self._send(response)

    def _send(self, response: Response | bytes) -> None:
        if not self._transport.is_closing():
            for part in (response,) if isinstance(response, bytes) else response.parts():
                self._transport.write(part)


async def listen(handle: Handler, port: int = 0) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(handle), "127.0.0.1", port, backlog=4096)


def _decoded(chunked: bytes) -> bytes:
    """Return a chunked body without its framing, signatures and trailers."""
    parts, at = [], 0
    while True:
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end].split(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(chunked[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
