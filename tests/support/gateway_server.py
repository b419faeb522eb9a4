"""Servers that tests run in a thread of their process: a gateway, and a proxy that records what an engine sampled."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agent_wrapper.contract import Sampling, Trajectory
from rollout_backend.core.session_key import SessionClaims, issue
from rollout_backend.gateway.access import KEEP_ALIVE_S, bounded_protocol, max_connections
from rollout_backend.gateway.engine.protocol import EngineRequest, ReplyReader
from rollout_backend.gateway.engine.sglang import SglangProtocol
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.local.scripted import Script, ScriptedEngine
from rollout_backend.serving.server_process import free_port
from rollouts import make_claims

if TYPE_CHECKING:  # verl's environment has neither
    import anthropic
    import openai

SECRET = "test-secret-" * 4
CONTROL_KEY = "test-control-" * 4
_VIEWS = itertools.count()


class _Server(uvicorn.Server):
    async def main_loop(self) -> None:  # uvicorn's notices `should_exit` after up to 0.1 s
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.005)


class ServerThread:
    """An ASGI application served by a thread, so that plain tests can call it. A context manager."""

    def __init__(self, app: Any, port: int | None = None, **options: Any) -> None:
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {"log_level": "warning", "access_log": False, "timeout_keep_alive": KEEP_ALIVE_S, **options}
        self._server = _Server(uvicorn.Config(app, port=port, **options))
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.002)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def session_key(session: str, *, secret: str = SECRET, lives_s: float = 600, **more: Any) -> str:
    """Return a session's key; `more` are its other claims, and the trainer's sampling."""
    claims = {name: more.pop(name) for name in SessionClaims.model_fields.keys() & more.keys()}
    claims = {"run_id": "run", "rollout_id": "r", "expires_at": time.time() + lives_s, **claims}
    return issue(secret, make_claims(session, sampling=Sampling(**more), **claims))


class GatewayServer(ServerThread):
    """A gateway, with what an agent, its wrapper and the trainer ask it.

    A `view` of it shows a test only the test's own sessions, requests at the engine and counts.
    """

    secret = SECRET
    control = {"Authorization": f"Bearer {CONTROL_KEY}"}  # noqa: RUF012

    def __init__(self, app: Any, port: int | None = None, engine: ScriptedEngine | None = None) -> None:
        super().__init__(app, port, http=bounded_protocol(max_connections(1024), head_s=60), ws="none")
        self.engine: Any = engine
        self._clients = ExitStack()
        self._prefix = ""
        self._before: GatewayStats | None = None

    def view(self, script: Script) -> GatewayServer:
        view = copy.copy(self)
        view._clients = ExitStack()
        view._prefix = f"{next(_VIEWS)}-"
        view._before = self.stats()
        view.engine = EngineView(self.engine, script)
        return view

    def close(self) -> None:
        """Close the clients."""
        self._clients.close()

    def stop(self) -> None:
        self.close()
        super().stop()

    def key(self, session: str = "s1", **claims: Any) -> str:
        return session_key(self._prefix + session, **claims)

    def client(self, session: str = "s1", **more: Any) -> openai.OpenAI:
        return self.client_with(self.key(session, **more))

    def client_with(self, key: str) -> openai.OpenAI:
        import openai

        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        return self._clients.enter_context(client)

    def anthropic(self, session: str = "s1", **more: Any) -> anthropic.Anthropic:
        import anthropic

        client = anthropic.Anthropic(base_url=self.url, api_key=self.key(session, **more), max_retries=0)
        return self._clients.enter_context(client)

    def headers(self, session: str = "s1", **more: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key(session, **more)}"}

    def post(
        self,
        body: bytes | dict[str, Any],
        session: str = "s1",
        *,
        path: str = "/v1/chat/completions",
        key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key or self.key(session)}", **(headers or {})}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=120)

    def stream(self, body: dict[str, Any], session: str = "s1", path: str = "/v1/chat/completions") -> Any:
        """Post a request whose answer is read line by line: a context manager."""
        body = {"model": "scripted", "stream": True, **body}
        return httpx.stream("POST", self.url + path, json=body, headers=self.headers(session), timeout=120)

    def seal(self, session: str = "s1") -> httpx.Response:
        return self.post(b"", session, path="/v1/rollout/trajectory")

    def trajectory(self, session: str = "s1") -> Trajectory:
        return Trajectory.decode(self.seal(session).raise_for_status().content)

    def instruct(self, path: str, body: object = None) -> httpx.Response:
        """Post to the control API."""
        return httpx.post(f"{self.url}/control/{path}", json=body, headers=self.control, timeout=120)

    def stats(self) -> GatewayStats:
        """Return the counts; those of a view are since it was made."""
        answer = httpx.get(f"{self.url}/control/stats", headers=self.control, timeout=120)
        now = GatewayStats.model_validate(answer.json())
        if self._before is None:
            return now
        fields: dict[str, Any] = {}
        for (name, value), (_, before) in zip(now, self._before, strict=True):
            fields[name] = dict(Counter(value) - Counter(before)) if isinstance(value, dict) else value - before
        return GatewayStats(**fields)


class EngineView:
    """A scripted engine that tests share: its requests and aborted calls since this test began."""

    def __init__(self, engine: ScriptedEngine, script: Script) -> None:
        self._engine = engine
        self._first, self._aborted = len(engine.requests), engine.aborted
        self.replies = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return self._engine.requests[self._first :]

    @property
    def aborted(self) -> int:
        return self._engine.aborted - self._aborted

    @property
    def replies(self) -> Script:
        return self._engine.replies

    @replies.setter
    def replies(self, script: Script) -> None:
        self._engine.replies = script


@dataclass
class Sampled:
    """One answer of the engine."""

    prompt: list[int]
    constrained: bool
    reader: ReplyReader
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)

    def add(self, reply: dict[str, Any]) -> None:
        """Add a whole answer, or the next piece of a stream."""
        ids, logprobs = self.reader.read(reply)
        self.ids += ids
        self.logprobs += logprobs

    @property
    def finished(self) -> bool:
        return self.reader.finish is not None


class Witness(ServerThread):
    """Forward requests for tokens to the engine, and record every answer."""

    def __init__(self, engine_url: str) -> None:
        self._protocol = SglangProtocol()
        super().__init__(Starlette(routes=[Route(self._protocol.path, self._generate, methods=["POST"])]))
        self._calls: list[Sampled] = []
        self._generate_url = engine_url + self._protocol.path

    @property
    def sampled(self) -> list[Sampled]:
        return [call for call in self._calls if call.finished]

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        params = body["sampling_params"]
        prompt = body["input_ids"]
        constrained = not {"structural_tag", "json_schema"}.isdisjoint(params)
        call = Sampled(prompt, constrained, self._protocol.reader(EngineRequest(prompt, params)))
        self._calls.append(call)
        if body.get("stream"):
            return StreamingResponse(self._stream(body, call), media_type="text/event-stream")
        async with httpx.AsyncClient(timeout=300) as http:
            answer = await http.post(self._generate_url, json=body)
        if answer.status_code == 200:
            call.add(answer.json())
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def _stream(self, body: dict[str, Any], call: Sampled) -> AsyncIterator[bytes]:
        async with (
            httpx.AsyncClient(timeout=300) as http,
            http.stream("POST", self._generate_url, json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    call.add(json.loads(line.removeprefix("data: ")))
                yield f"{line}\n".encode()
