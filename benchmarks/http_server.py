"""A small HTTP/1.1 server with delayed answers. Each costs some 20 us of CPU, a tenth of what a framework takes."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools


@dataclass(slots=True)
class Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]  # by names in lower case
    body: bytes


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
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:  # a defect of `handle`
            raise
        except httptools.HttpParserError:  # a router's probe by HTTP/2
            self._transport.close()

    # --- called by the parser ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", {}, b""

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if "expect" in self._headers:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        path, _, query = self._target.decode().partition("?")
        method = self._parser.get_method().decode()
        self._handle(Request(method, unquote(path), query, self._headers, self._body), self._answer)

    # --- answers -------------------------------------------------------------------------------------------

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
