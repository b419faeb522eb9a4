"""Serve an engine that answers every call with the same tokens: PORT, and the answers as JSON on standard input.

`reply` and `pieces` are the body and the events of an answer of `/generate`; `chat` and `chat_pieces` those of any
other path, for proxies. `by_key` has other answers for calls with these routing keys. Of a request only its head is
read, and whether it asks for a stream.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from http_server import Answer, Request, Response, listen


class Engine:
    """Ready-made responses."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self._latency_s: float = made["latency_s"]
        bodies = {name: (json.dumps(made[name]).encode(),) for name in ("reply", "chat")}
        kind = "content-type: application/json\r\n"
        self._whole = {name: b"".join(Response(200, body, kind).parts()) for name, body in bodies.items()}
        self._by_key = {key: Engine(answers) for key, answers in made.get("by_key", {}).items()}
        self._pieces = {"reply": _stream(made["pieces"]), "chat": _stream(made["chat_pieces"])}

    def handle(self, request: Request, answer: Answer) -> None:
        if (other := self._by_key.get(request.headers.get("x-smg-routing-key", ""))) is not None:
            other.handle(request, answer)
            return
        name = "reply" if request.path == "/generate" else "chat"
        if request.method == "GET":
            answer(Response(200 if request.path == "/health" else 404, (b"{}",)), 0)
        elif b'"stream":' in request.body[-2000:]:
            pieces = self._pieces[name]
            for i, piece in enumerate(pieces, 1):
                answer(piece, self._latency_s * i / len(pieces))
        else:
            answer(self._whole[name], self._latency_s)


def _stream(pieces: Sequence[Any]) -> list[bytes]:
    """Return a response in chunks, one for each event."""
    events = [*(f"data: {json.dumps(piece)}\n\n".encode() for piece in pieces), b"data: [DONE]\n\n"]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    *most, last, end = [head + chunks[0], *chunks[1:]]
    return [*most, last + end + b"0\r\n\r\n"]


async def main(port: int) -> None:
    server = await listen(Engine(json.load(sys.stdin)).handle, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
