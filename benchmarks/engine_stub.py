"""Serve an engine that answers every call with the same tokens: PORT, and the answers as JSON on standard input.

The standard input has `latency_s`, `reply` (the body of an answer of `/generate`), `pieces` (the events of a streamed
one), and `chat` and `chat_pieces` (the answers of any other path that is posted to, for proxies). Answers are
ready-made bytes. Of a request only its length is read, and whether it asks for a stream, so a call costs this process
12 us.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_END = b"\r\n\r\n"


def response(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(events: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a response in chunks, one for each event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    for event in events:
        yield head + b"%x\r\n%s\r\n" % (len(event), event)
        head = b""
    yield b"0\r\n\r\n"


def _chunks(pieces: Sequence[Any]) -> list[bytes]:
    events = [f"data: {json.dumps(piece)}\n\n".encode() for piece in pieces]
    *chunks, last, end = stream([*events, b"data: [DONE]\n\n"])
    return [*chunks, last + end]


class Answers:
    """The responses of one engine."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self.latency_s: float = made["latency_s"]
        self.reply = response(json.dumps(made["reply"]).encode())
        self.pieces = _chunks(made["pieces"])
        self.chat_pieces = _chunks(made["chat_pieces"])
        self.chat = response(json.dumps(made["chat"]).encode())
        self.healthy = response(b"{}")
        self.unknown = response(b"{}", "404 Not Found")


class Connection(asyncio.Protocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        self._needed = 0  # bytes of the request, once its head is complete

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while self._read:
            if not self._needed:
                end = self._read.find(_END)
                if end < 0:
                    return
                self._needed = end + len(_END) + _content_length(self._read[:end])
            if len(self._read) < self._needed:
                return
            request, self._needed = bytes(self._read[: self._needed]), 0
            del self._read[: len(request)]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        made, path = self._answers, request.split(b" ", 2)[1]
        if request.startswith(b"GET"):
            self._transport.write(made.healthy if path == b"/health" else made.unknown)
        elif b'"stream":' in request[-2000:]:
            pieces = made.pieces if path == b"/generate" else made.chat_pieces
            for i, piece in enumerate(pieces, 1):
                self._loop.call_later(made.latency_s * i / len(pieces), self._write, piece)
        else:
            self._loop.call_later(made.latency_s, self._write, made.reply if path == b"/generate" else made.chat)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def _content_length(head: bytearray) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def serve(port: int, answers: Answers) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Answers(json.load(sys.stdin))))
