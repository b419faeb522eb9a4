"""AgentCore's data plane with sessions of a real `RolloutApp`, some of which are lost.

All sessions share this process and one app. A killed session is like a dead container: its wrapper is cancelled, so
it publishes nothing and sends no more heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import httpx

from agent_wrapper import RolloutApp, RolloutContext
from agent_wrapper.contract import REQUEST_FIELD
from emulated_aws.agentcore import SESSION, refused
from emulated_aws.http_server import Answer, Request, Response, json_response

KILLED = "killed"
_HEADER = SESSION.decode()


@dataclass(frozen=True)
class SessionRecord:
    """What one session has sampled, before it was lost or published its result."""

    step: int  # of the backend
    rollout_id: str
    nth: int  # among the rollout's sessions, from 1
    right: bool
    calls: int
    lost: str  # KILLED or ""


class WrappedAgents:
    """An async context manager. Its agents ask the model one question, and score the reply.

    A part `killed` of the rollouts lose their first session after it has sampled.
    """

    def __init__(self, is_right: Callable[[str, str], bool], seed: int, killed: float = 0.0) -> None:
        self.records: list[SessionRecord] = []
        self._is_right, self._seed, self._killed = is_right, seed, killed
        self._steps: dict[str, int] = {}  # by rollout
        self._sessions: Counter[str] = Counter()  # by rollout
        self._rollouts: dict[str, str] = {}  # by session
        self._dead: set[str] = set()  # rollouts whose current session was killed
        self._app = RolloutApp()
        self._app.entrypoint(self._agent)
        self._model = httpx.AsyncClient(timeout=None)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        transport = httpx.ASGITransport(app=self._app.asgi)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://agent")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._app.shutdown()
        await self._http.aclose()

    def handle(self, request: Request, answer: Answer) -> None:
        task = asyncio.ensure_future(self._serve(request, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: Request, answer: Answer) -> None:
        session_id = request.text(SESSION)
        if request.path.endswith("/invocations"):
            found = await self._invoke(session_id, request.body)
        elif request.path.endswith("/stopruntimesession"):
            found = await self._stop(session_id)
        else:
            found = refused(403, "AccessDeniedException")
        answer(found, 0.0)

    async def _invoke(self, session_id: str, body: bytes) -> Response:
        if session_id not in self._rollouts:
            asked = json.loads(body)[REQUEST_FIELD]
            rollout_id = self._rollouts[session_id] = asked["rollout_id"]
            self._steps[rollout_id] = asked["step"]
            self._sessions[rollout_id] += 1
            self._dead.discard(rollout_id)
        reply = await self._http.post("/invocations", content=body, headers={_HEADER: session_id})
        return json_response(reply.status_code, reply.json(), f"{_HEADER}: {session_id}\r\n")

    async def _stop(self, session_id: str) -> Response:
        if self._rollouts.get(session_id) in self._dead:
            return refused(404, "ResourceNotFoundException")
        reply = await self._http.post("/stop", headers={_HEADER: session_id})
        if reply.status_code == 404:
            return refused(404, "ResourceNotFoundException")
        return json_response(200, {"runtimeSessionId": session_id, "statusCode": 200})

    async def _agent(self, context: RolloutContext) -> dict[str, Any]:
        """Run in the app's thread for agents."""
        rollout_id = str(context.rollout_id)
        message = await self._reply(context, [{"role": "user", "content": context.payload["question"]}])
        right = self._is_right(message["content"] or "", context.payload["answer"])
        nth = self._sessions[rollout_id]
        lost = KILLED if nth == 1 and self._lot(rollout_id) < self._killed else ""
        self.records.append(SessionRecord(self._steps[rollout_id], rollout_id, nth, right, 1, lost))
        if lost:
            self._loop.call_soon_threadsafe(self._kill, rollout_id)
            await asyncio.sleep(context.remaining_s + 60)
        return {"reward": float(right)}

    async def _reply(self, context: RolloutContext, messages: list[dict[str, Any]], **request: Any) -> dict[str, Any]:
        """Call the model, and return its message."""
        reply = await self._model.post(
            f"{context.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {context.api_key}"},
            json={"model": context.model, "messages": messages, **request},
        )
        message: dict[str, Any] = reply.raise_for_status().json()["choices"][0]["message"]
        return message

    def _lot(self, rollout_id: str) -> float:
        """Return a number from 0 to 1, equal for the same session of a rollout with the same seed."""
        return random.Random(f"{self._seed} {rollout_id} {self._sessions[rollout_id]}").random()

    def _kill(self, rollout_id: str) -> None:
        self._dead.add(rollout_id)
        for task in asyncio.all_tasks():
            if task.get_name() == f"rollout-{rollout_id}":
                task.cancel()
