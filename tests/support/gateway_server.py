"""Servers that tests run in a thread of their process, such as a gateway."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import httpx
import uvicorn

from agent_wrapper.contract import Sampling, Trajectory
from rollout_backend.core.session_key import SessionClaims, issue
from rollout_backend.model.gateway.access import KEEP_ALIVE_S, PacedServer, bounded_protocol, max_connections
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.scripted import Script, ScriptedEngine
from rollouts import make_claims

SECRET = "test-secret-" * 4
CONTROL_KEY = "test-control-" * 4
_VIEWS = itertools.count()


class _Server(PacedServer):
    async def main_loop(self) -> None:  # uvicorn's notices `should_exit` after up to 0.1 s
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.005)


class ServerThread:
    """An ASGI application served by a thread, so that plain tests can call it. A context manager."""

    def __init__(self, app: Any, port: int | None = None, known: Any = lambda _: False, **options: Any) -> None:
        """`known` is `is_known` of `PacedServer`."""
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {"log_level": "warning", "access_log": False, "timeout_keep_alive": KEEP_ALIVE_S, **options}
        self._server = _Server(uvicorn.Config(app, port=port, **options), known)
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
        protocol = bounded_protocol(max_connections(1024), head_s=60)
        super().__init__(app, port, app.state.is_known, http=protocol, ws="none")
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

    def client(self, session: str = "s1", **more: Any) -> Any:
        return self.client_with(self.key(session, **more))

    def client_with(self, key: str) -> Any:
        import openai

        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        return self._clients.enter_context(client)

    def anthropic(self, session: str = "s1", **more: Any) -> Any:
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
