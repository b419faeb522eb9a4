"""AgentCore's data plane with sessions of a real `RolloutApp`, some of which are lost.

All sessions share this process and one app. A killed session is like a dead container: its wrapper is cancelled, so
it publishes nothing and sends no more heartbeats. A late one returns only after its agent's deadline.
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

KILLED, LATE = "killed", "late"
_HEADER = SESSION.decode()


@dataclass(frozen=True)
class LossRates:
    """The probability that a session is lost, for each token that its agent has sampled."""

    killed: float = 0.0
    late: float = 0.0
    scored_0: bool = False  # the agent returns the reward 0 instead

    def draw(self, name: str, tokens: int) -> str:
        """Return KILLED, LATE, or "" for a session that is not lost. Equal names draw the same lot."""
        lot = random.Random(name).random()
        if lot < self.killed * tokens:
            return KILLED
        return LATE if lot < (self.killed + self.late) * tokens else ""


@dataclass(frozen=True)
class SessionRecord:
    """What one session has sampled, before it was lost or published its result."""

    step: int  # of the backend
    rollout_id: str
    nth: int  # among the rollout's sessions, from 1
    right: bool
    tokens: int
    lost: str  # KILLED, LATE or ""


class WrappedAgents:
    """An async context manager. Its agents ask the model one question, and score the reply."""

    def __init__(self, is_right: Callable[[str, str], bool], rates: LossRates, seed: int) -> None:
        self.records: list[SessionRecord] = []
        self._is_right, self._rates, self._seed = is_right, rates, seed
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
        reply = await self._model.post(
            f"{context.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {context.api_key}"},
            json={"model": context.model, "messages": [{"role": "user", "content": context.payload["question"]}]},
        )
        completion = reply.raise_for_status().json()
        right = self._is_right(completion["choices"][0]["message"]["content"] or "", context.payload["answer"])
        tokens, nth = completion["usage"]["completion_tokens"], self._sessions[rollout_id]
        lost = self._rates.draw(f"{self._seed} {rollout_id} {nth}", tokens)
        self.records.append(SessionRecord(self._steps[rollout_id], rollout_id, nth, right, tokens, lost))
        if lost and self._rates.scored_0:
            return {"reward": 0.0}
        if lost == KILLED:
            self._loop.call_soon_threadsafe(self._kill, rollout_id)
        if lost:
            await asyncio.sleep(context.remaining_s + 60)
        return {"reward": float(right)}

    def _kill(self, rollout_id: str) -> None:
        self._dead.add(rollout_id)
        for task in asyncio.all_tasks():
            if task.get_name() == f"rollout-{rollout_id}":
                task.cancel()
