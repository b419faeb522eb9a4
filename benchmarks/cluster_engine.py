"""Serve a scripted engine whose reply follows from the prompt alone: `cluster_engine.py PORT SECONDS`.

Each reply takes SECONDS, and calls run concurrently. `/counts` has the number of calls that it has answered, and of
their sessions.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import zlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_backend.local.scripted import Reply, ScriptedEngine


def answer(prompt: str) -> str:
    """Return the reply to a prompt: 60 tokens of the byte model."""
    return f"I have read {len(prompt):06d} characters with the checksum {zlib.crc32(prompt.encode()):010d}."


class Engine(ScriptedEngine):
    def __init__(self, port: int, seconds: float) -> None:
        super().__init__((), port=port)
        self._seconds = seconds
        self._in_flight = 0
        self._calls = 0
        self._sessions: set[str] = set()

    def _routes(self) -> list[Route]:
        return [*super()._routes(), Route("/v1/loads", self._load), Route("/counts", self._counts)]

    async def _load(self, _: Request) -> Response:
        load = {"num_running_reqs": self._in_flight, "num_waiting_reqs": 0, "max_running_requests": 256}
        return JSONResponse({"loads": [load]})

    async def _counts(self, _: Request) -> Response:
        return JSONResponse({"calls": self._calls, "sessions": len(self._sessions)})

    async def _reply(self, session: str, body: dict[str, Any]) -> Reply:
        self.requests.clear()  # kept for tests
        self._in_flight += 1
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self._in_flight -= 1
        self._calls += 1
        self._sessions.add(session)
        return answer(self.tokenizer.decode(body["input_ids"], skip_special_tokens=False))


if __name__ == "__main__":
    with Engine(int(sys.argv[1]), float(sys.argv[2])):
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
