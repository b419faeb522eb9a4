"""S3, SQS, AgentCore and the probes of an engine on one port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Protocol

from emulated_aws.http_server import Answer, Request, json_response, listen
from emulated_aws.s3 import S3
from emulated_aws.sqs import Sqs

_ENGINE_PATHS = ("/health", "/get_model_info", "/model_info", "/get_server_info", "/server_info", "/v1/models")


class Agents(Protocol):
    def handle(self, request: Request, answer: Answer) -> None:
        """Answer a call of AgentCore's data plane."""


class Cloud:
    """`control` has what `/_emulator/NAME` returns."""

    def __init__(self, agents: Agents | None = None, *, s3_s: float = 0.0, sqs_s: float = 0.0) -> None:
        """Latencies are in seconds. A subclass sets `agents` that use this S3 and SQS."""
        self.calls: Counter[str] = Counter()
        self.s3, self.sqs = S3(s3_s, self.calls), Sqs(sqs_s, self.calls)
        self.agents: Any = agents

    def control(self, name: str) -> Any:
        return {"calls": self.calls, "cpu_s": time.process_time()}

    def handle(self, request: Request, answer: Answer) -> None:
        path = request.path
        if b"x-amz-target" in request.headers:
            self.sqs.handle(request, answer)
        elif path.startswith("/runtimes/") or path in ("/invocations", "/stop"):
            self.agents.handle(request, answer)
        elif path.startswith("/_emulator/"):
            answer(json_response(200, self.control(path.rpartition("/")[2])), 0)
        elif path in _ENGINE_PATHS or path == "/ping":
            answer(json_response(200, {}), 0)
        else:
            self.s3.handle(request, answer)

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Yield the URL."""
        server = await listen(self.handle, port)
        clock = asyncio.create_task(self.sqs.run())
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            clock.cancel()
            server.close()
