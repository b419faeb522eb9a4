"""Sessions of a real `RolloutApp` on the emulated AgentCore, some of which are lost.

All sessions share this process and one app. A killed session is like a dead container: its wrapper is cancelled, so
it publishes nothing and sends no more heartbeats.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from emulated_aws import ARN, REGION, SESSION, Cloud

from agent_wrapper import RolloutApp, RolloutContext
from agent_wrapper.contract import REQUEST_FIELD

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}


@dataclass(frozen=True)
class SessionRecord:
    """What one session has sampled, before it was lost or published its result."""

    first: bool  # of its rollout's sessions
    right: bool
    calls: int
    lost: bool


class WrappedAgents(Cloud):
    """Agents that ask the model one question, and score the reply.

    A part `killed` of the rollouts lose their first session after it has sampled.
    """

    def __init__(self, is_right: Callable[[str, str], bool], seed: int = 0, killed: float = 0.0) -> None:
        super().__init__()
        self.records: list[SessionRecord] = []
        self._is_right, self._seed, self._killed = is_right, seed, killed
        self._sessions: Counter[str] = Counter()  # by rollout
        self._rollouts: dict[str, str] = {}  # by session
        self._dead: set[str] = set()  # sessions
        self._app = RolloutApp()
        self._app.entrypoint(self._agent)
        self._model = httpx.AsyncClient(timeout=None)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve S3, SQS and AgentCore, and yield their URL."""
        self._loop = asyncio.get_running_loop()
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self._app.asgi), base_url="http://agent")
        async with super().serve() as url, self._http:
            # Of the agents and of the trainer, which have no other keys.
            os.environ.update(KEYS, AWS_ENDPOINT_URL=url)
            yield url
            await self._app.shutdown()

    async def invoke(self, session_id: str, payload: Any) -> Any:
        if session_id not in self._rollouts:
            rollout_id = self._rollouts[session_id] = payload[REQUEST_FIELD]["rollout_id"]
            self._sessions[rollout_id] += 1
        reply = await self._http.post("/invocations", json=payload, headers={SESSION: session_id})
        return reply.raise_for_status().json()

    async def stop(self, session_id: str) -> bool:
        if session_id in self._dead:
            return False
        return (await self._http.post("/stop", headers={SESSION: session_id})).status_code != 404

    async def _agent(self, context: RolloutContext) -> dict[str, Any]:
        """Run in the app's thread for agents."""
        rollout_id = str(context.rollout_id)
        message = await self._reply(context, [{"role": "user", "content": context.payload["question"]}])
        right = self._is_right(message["content"] or "", context.payload["answer"])
        first = self._sessions[rollout_id] == 1
        killed = first and self._lot(rollout_id) < self._killed
        self.records.append(SessionRecord(first, right, 1, killed))
        if killed:
            self._loop.call_soon_threadsafe(self._kill, rollout_id)
            await asyncio.sleep(context.remaining_s + 60)
        return {"reward": float(right)}

    async def _reply(self, context: RolloutContext, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Call the model, and return its message."""
        reply = await self._model.post(
            f"{context.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {context.api_key}"},
            json={"model": context.model, "messages": messages},
        )
        message: dict[str, Any] = reply.raise_for_status().json()["choices"][0]["message"]
        return message

    def _lot(self, rollout_id: str) -> float:
        """Return a number from 0 to 1, equal for the same session of a rollout with the same seed."""
        return random.Random(f"{self._seed} {rollout_id} {self._sessions[rollout_id]}").random()

    def _session(self, rollout_id: str) -> str:
        return next(name for name in reversed(self._rollouts) if self._rollouts[name] == rollout_id)

    def _kill(self, rollout_id: str) -> None:
        self._dead.add(self._session(rollout_id))
        for task in asyncio.all_tasks():
            if task.get_name() == f"rollout-{rollout_id}":
                task.cancel()


def backend_settings(url: str, output: Path) -> dict[str, Any]:
    """Return the backend's settings for these sessions."""
    return {
        "aws": {"region": REGION, "endpoint_url": url},
        "storage": {"bucket": "results"},
        "runtime": {"kind": "agentcore", "arn": ARN, "endpoint_url": url, "invoke_per_s": 200, "max_attempts": 50},
        # No stragglers, and limits that only end hangs, so that a slow machine loses no rollout.
        "timeouts": {
            "model_call_s": 600, "agent_s": 900, "publish_grace_s": 60, "collection_s": 1800, "session_key_s": 2400,
            "heartbeat_s": 2,
        },
        "circuit_breaker": {"max_failures": None},
        "output_dir": str(output),
    }  # fmt: skip
