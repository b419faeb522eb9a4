"""Agents that fail: the same ones for this project's wrapper and for another's.

An invoke starts a session, whose agent works for some seconds, as `rivals/harness.py` says. A session is open until
it is stopped, or its container has died. The agents call no model. What one sampled is a list of token ids that no
other session has.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from common import half_sampled
from emulated_aws import Cloud
from rivals.harness import Agent, Died, FailingAgents, Truth, tokens_of

from agent_wrapper.contract import (
    REQUEST_FIELD,
    Announcement,
    Failure,
    Outcome,
    Rollout,
    RolloutRequest,
    Sampling,
    Trajectory,
    result_key,
)
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_key import SessionClaims

MODEL = "scripted"


@dataclass
class Session:
    agent: Agent
    state: dict[str, Any] | None = None  # what it answers to a status call
    work: asyncio.Task[None] | None = None


class FaultyAgents(Cloud):
    def __init__(self, fault: str, secret: str, folder: Path, note: Callable[[Truth], object]) -> None:
        """`folder` and `note` are those of `FailingAgents`."""
        super().__init__(s3_s=0.01, sqs_s=0.005, runtime_s=0.01)
        self._fault, self._sealer = fault, Sealer(secret)
        self._agents = FailingAgents(fault, folder, note)
        self._sessions: dict[str, Session] = {}
        self._http: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        for session in self._sessions.values():
            if session.work is not None:
                session.work.cancel()
        if self._http is not None:
            await self._http.close()

    def control(self, name: str) -> Any:
        """Return the tokens that the trainer's gateway has of each session whose agent has called the model."""
        return {session_id: tokens_of(session.agent.proof) for session_id, session in self._sessions.items()}

    # --- calls -------------------------------------------------------------------------------------------

    def begin_ours(self, session_id: str, request: dict[str, Any]) -> None:
        if session_id not in self._sessions:
            session = self._sessions[session_id] = Session(self._agents.make(request["task_id"]))
            self._begin(session, self._run_ours, RolloutRequest.parse(request))

    def begin_by_s3(self, session_id: str, key: str, payload: dict[str, Any]) -> None:
        session = self._sessions.get(session_id) or Session(self._agents.make(payload["task"]))
        self._sessions[session_id] = session
        # Each invoke of its app starts the agent, also of a session that has begun.
        self._begin(session, self._run_by_s3, key, payload)

    def call_by_http(self, session_id: str, name: str, start: bool, payload: dict[str, Any]) -> dict[str, Any]:
        session = self._sessions.get(session_id)
        if session is None and start:
            session = self._sessions[session_id] = Session(self._agents.make(payload["task"]))
            self._begin(session, self._run_by_http)
        if session is None or not session.agent.open:  # a call after the container's death starts a new one
            return {"status": "not_found"}
        return session.state or {"status": "in_progress"}

    async def stop(self, session_id: str) -> bool:
        session = self._sessions.get(session_id)
        if session is None or not session.agent.open:
            return False
        session.agent.end()
        if session.work is not None:
            session.work.cancel()
        return True

    def _begin(self, session: Session, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        async def until_death() -> None:
            with contextlib.suppress(Died):
                await work(session, *arguments)

        session.work = asyncio.create_task(until_death())

    # --- agents ------------------------------------------------------------------------------------------

    async def _run_by_s3(self, session: Session, key: str, payload: dict[str, Any]) -> None:
        """Store what the toolkit's wrapper stores."""
        agent, asked = session.agent, payload[REQUEST_FIELD]
        try:
            reward = await agent.run()
            ids = tokens_of(0) if agent.fault == "forged_tokens" else tokens_of(agent.proof)
            result: dict[str, Any] = {"rewards": [reward], "rollout_data": [{"token_ids": ids}]}
            result |= {"status_code": 200, "stop_reason": "end_turn"}
        except RuntimeError as error:
            result = {"status_code": 500, "stop_reason": str(error), "traceback": str(error)}
        meta = {"input_id": asked["input_id"], "s3_bucket": asked["s3_bucket"], "result_key": key}
        body = json.dumps({**result, **meta, "payload": payload}).encode()
        if agent.fault == "truncated_object":
            body = body[: len(body) // 2]
        for _ in range(2 if self._fault == "published_twice" else 1):
            self.s3.put(asked["s3_bucket"], key, body)

    async def _run_by_http(self, session: Session) -> None:
        """Keep the state that the toolkit's wrapper answers to status calls."""
        try:
            reward = await session.agent.run()
        except RuntimeError as error:
            session.state = {"status": "completed", "error": str(error)}
        else:
            if math.isnan(reward):  # its store refuses to encode it
                session.state = {"status": "completed", "error": "Out of range float values are not JSON compliant"}
            else:
                session.state = {"status": "completed", "result": {"reward": reward}}

    async def _run_ours(self, session: Session, request: RolloutRequest) -> None:
        agent = session.agent
        heartbeats = asyncio.create_task(self._send_heartbeats(request))
        if agent.fault == "foreign_container":
            self._write_for_another(agent, request)
        try:
            async with asyncio.timeout(request.remaining_s) as limit:
                if agent.fault == "agent_freezes":
                    asyncio.get_running_loop().call_later(agent.seconds / 2, heartbeats.cancel)
                    limit.reschedule(None)  # the wrapper is frozen, too
                reward = await agent.run()
            if math.isfinite(reward):
                self._publish(agent, request, self._rollout(agent, request, reward))
            else:
                self._fail(agent, request, Outcome.AGENT_ERROR, "bad_reward", "the reward is nan")
        except RuntimeError as error:
            self._fail(agent, request, Outcome.AGENT_ERROR, "exception", str(error))
        except TimeoutError:
            self._fail(agent, request, Outcome.TIMED_OUT, "agent_deadline", "the agent took too long")
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self, request: RolloutRequest) -> None:
        url, every_s = request.endpoint.heartbeat_url, request.heartbeat_s
        if url is None or every_s is None:
            return
        self._http = self._http or aiohttp.ClientSession()
        headers = {"Authorization": f"Bearer {request.endpoint.api_key}"}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._http.post(url, headers=headers) as reply:
                    await reply.read()
            await asyncio.sleep(every_s)

    def _rollout(self, agent: Agent, request: RolloutRequest, reward: float) -> Rollout:
        ids = _ids(request)
        claims = SessionClaims(
            **{name: ids[name] for name in ids if name != "task_id"}, sampling=Sampling(), expires_at=request.deadline
        )
        sampled = Trajectory(model=MODEL, segments=(half_sampled(tokens_of(agent.proof)),))
        sealed = self._sealer.seal(sampled, claims)
        forged = agent.fault == "forged_tokens"
        return Rollout(
            **ids,
            outcome=Outcome.COMPLETED,
            reward=reward,
            model=MODEL,
            segments=(half_sampled(tokens_of(0)),) if forged else sealed.segments,
            seal=sealed.seal,
        )

    def _fail(self, agent: Agent, request: RolloutRequest, outcome: Outcome, reason: str, message: str) -> None:
        failure = Failure(reason=reason, message=message)
        self._publish(agent, request, Rollout(**_ids(request), outcome=outcome, failure=failure))

    def _publish(self, agent: Agent, request: RolloutRequest, rollout: Rollout) -> None:
        """Write once and announce, as the wrapper does."""
        url = request.result.queue_url
        announcement = self._write(request, rollout, half=agent.fault == "truncated_object")
        if agent.fault != "message_lost":
            for _ in range(2 if self._fault == "published_twice" else 1):
                self.sqs.send(url, announcement.encode())
        if agent.fault == "poison_messages":
            missing = Announcement(bucket=announcement.bucket, key=f"{announcement.key}-nothing").encode()
            for poison in ("not JSON", "{}", '{"Records": [{"other": 1}]}', '{"Records": []}', missing):
                self.sqs.send(url, poison)
        if agent.fault == "foreign_run":  # and a rollout that was not planned
            for other in ({"run_id": "another-run"}, {"rollout_id": f"{rollout.task_id}.99"}):
                self.sqs.send(url, self._write(request, rollout.model_copy(update=other)).encode())

    def _write(self, request: RolloutRequest, rollout: Rollout, *, half: bool = False) -> Announcement:
        target, body = request.result, rollout.encode()
        key = result_key(target.prefix, rollout.run_id, rollout.step, rollout.rollout_id)
        if not self.s3.has(target.bucket, key):
            self.s3.put(target.bucket, key, body[: len(body) // 2] if half else body)
        return Announcement(bucket=target.bucket, key=key)

    def _write_for_another(self, agent: Agent, request: RolloutRequest) -> None:
        """Publish the result of the group's next rollout, whose id can be guessed, before its agent does."""
        name, _, number = request.rollout_id.rpartition(".")
        if number.isdigit():
            other = request.model_copy(update={"rollout_id": f"{name}.{(int(number) + 1) % 4}"})
            announcement = self._write(request, self._rollout(agent, other, 1.0))
            self.sqs.send(request.result.queue_url, announcement.encode())


def _ids(request: RolloutRequest) -> dict[str, Any]:
    names = ("run_id", "step", "task_id", "rollout_id", "attempt", "session_id")
    return {name: getattr(request, name) for name in names}
