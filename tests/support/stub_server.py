"""An HTTP server in a thread, whose answers a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_UP = 0  # as a status: the connection is closed without an answer


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body = b""

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, answer = self.server.handle(self)  # type: ignore[attr-defined]
        self.close_connection = True
        if status != HANG_UP:
            self.answer(status, answer)

    do_GET = do_PUT = do_POST

    def answer(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", "Content-Length": str(length or len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    """Answers each request with the status and the body that `handle` returns."""

    def __init__(self, handle: Callable[[Any], tuple[int, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.handle = handle
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
