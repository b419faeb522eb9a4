"""Serve an engine that answers every call with the same tokens: PORT, and the answers as JSON on standard input.

The standard input has `latency_s`, `reply` (the body of an answer of `/generate`), `pieces` (the events of a streamed
one), and `chat` and `chat_pieces` (the answers of any other path that is posted to, for proxies). Answers are
ready-made bytes, and of a request only its head is read, and whether it asks for a stream: a call costs some 20 us,
because the load generator has the same core.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Answers:
    """Ready-made responses."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self.latency_s: float = made["latency_s"]
        self.whole = {name: _response(200, json.dumps(made[name]).encode()) for name in ("reply", "chat")}
        self.pieces = {"reply": _stream(made["pieces"]), "chat": _stream(made["chat_pieces"])}


def _response(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _stream(pieces: Sequence[Any]) -> list[bytes]:
    """Return a response in chunks, one for each event."""
    events = [*(f"data: {json.dumps(piece)}\n\n".encode() for piece in pieces), b"data: [DONE]\n\n"]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    *most, last, end = [head + chunks[0], *chunks[1:]]
    return [*most, last + end + b"0\r\n\r\n"]


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, with one request at a time."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._read = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length or 0):
            return
        self._read = b""
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._transport.write(_response(200 if path == b"/health" else 404, b"{}"))
            return
        name, later = "reply" if path == b"/generate" else "chat", asyncio.get_running_loop().call_later
        if b'"stream":' in body[-2000:]:
            pieces = self._answers.pieces[name]
            for i, piece in enumerate(pieces, 1):
                later(self._answers.latency_s * i / len(pieces), self._send, piece)
        elif self._answers.latency_s:
            later(self._answers.latency_s, self._send, self._answers.whole[name])
        else:
            self._transport.write(self._answers.whole[name])

    def _send(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)


async def main(port: int) -> None:
    answers = Answers(json.load(sys.stdin))
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answers), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
