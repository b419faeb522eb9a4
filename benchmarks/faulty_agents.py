"""Agents that fail: the same ones for this project's wrapper and for another's.

An invoke starts a session, and its agent works for some seconds. One session of each group is the victim of the
fault. A session is open until it is stopped, or its container has died. The emulator records what each session truly
produced, so what a trainer has can be compared with it.

The agents call no model. What one sampled is a list of token ids that no other session has.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from common import half_sampled
from emulated_aws import S3, Sqs

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

REWARDS = (0.25, 0.5, 1.0)
TOKENS = 8  # of a session
MODEL = "scripted"
LATE_S = 40.0  # how long a late agent works: longer than any system lets it
_SHORTEST_S, _LONGEST_S = 1.0, 7.0
_ENVELOPE = "_agentcore_runtime"


def tokens_of(proof: int) -> list[int]:
    return list(range(TOKENS * proof, TOKENS * (proof + 1)))


@dataclass
class Session:
    """One session, and what is true of it."""

    id: str
    group: str
    proof: int  # that its tokens show
    reward: float
    seconds: float
    victim: bool
    payload: dict[str, Any]
    finished: bool = False  # its agent returned a reward
    open: bool = True
    state: dict[str, Any] | None = None  # what it answers to a status call
    work: asyncio.Task[None] | None = None


class FaultyAgents:
    """Sessions of all three contracts: this project's, and the toolkit's by S3 and by HTTP."""

    def __init__(self, s3: S3, sqs: Sqs, fault: str, secret: str, half: int) -> None:
        """`half` is the number of finished agents at which the event of this name is set."""
        self._s3, self._sqs, self._fault = s3, sqs, fault
        self._sealer = Sealer(secret)
        self.sessions: dict[str, Session] = {}
        self.begun = asyncio.Event()
        self.half = asyncio.Event()
        self._unfinished = half
        self._of_group: Counter[str] = Counter()
        self._http: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        for session in self.sessions.values():
            if session.work is not None:
                session.work.cancel()
        if self._http is not None:
            await self._http.close()

    # --- calls -------------------------------------------------------------------------------------------

    async def invoke(self, session_id: str, payload: Any) -> Any:
        envelope = payload.get(_ENVELOPE)
        if envelope is not None:
            return self._call(session_id, payload, envelope["operation"], envelope["invocation_id"])
        if "rollout_id" in payload[REQUEST_FIELD]:
            if session_id not in self.sessions:
                self._begin(session_id, payload[REQUEST_FIELD]["task_id"], payload, self._run_ours)
            return {"status": "accepted"}
        asked = payload[REQUEST_FIELD]
        session = self.sessions.get(session_id) or self._new(session_id, payload["task"], payload)
        # Each invoke of its app starts the agent, also of a session that has begun.
        session.work = asyncio.ensure_future(self._run_by_s3(session))
        key = f"{asked['exp_id']}/{asked['input_id']}/{session_id}.json"
        return {"status": "processing", "s3_bucket": asked["s3_bucket"], "result_key": key}

    def _call(self, session_id: str, payload: dict[str, Any], operation: str, name: str) -> dict[str, Any]:
        state = {"version": 1, "invocation_id": name}
        session = self.sessions.get(session_id)
        if session is None and operation == "start":
            session = self._begin(session_id, payload["task"], payload, self._run_by_http)
        if session is None or not session.open:  # a call after the container's death starts a new one
            return {**state, "status": "not_found"}
        return {**state, **(session.state or {"status": "in_progress"})}

    async def stop(self, session_id: str) -> bool:
        session = self.sessions.get(session_id)
        if session is None or not session.open:
            return False
        session.open = False
        if session.work is not None:
            session.work.cancel()
        return True

    def _begin(
        self, session_id: str, group: str, payload: dict[str, Any], run: Callable[[Session], Awaitable[None]]
    ) -> Session:
        session = self._new(session_id, group, payload)
        session.work = asyncio.ensure_future(run(session))
        return session

    def _new(self, session_id: str, group: str, payload: dict[str, Any]) -> Session:
        nth = self._of_group[group]
        self._of_group[group] += 1
        draw = random.Random(f"{group} {nth}")
        session = Session(
            session_id,
            group,
            proof=1 + len(self.sessions),
            reward=draw.choice(REWARDS),
            seconds=draw.uniform(_SHORTEST_S, _LONGEST_S),
            victim=nth == 1,
            payload=payload,
        )
        self.sessions[session_id] = session
        self.begun.set()
        return session

    # --- agents ------------------------------------------------------------------------------------------

    async def _agent(self, session: Session) -> float:
        """Return the reward of an agent, or raise as it does. One that has died or hangs never returns."""
        fault = self._fault if session.victim else ""
        match fault:
            case "agent_dies":
                await asyncio.sleep(session.seconds / 2)
                session.open = False
                await asyncio.Event().wait()
            case "agent_freezes":
                await asyncio.sleep(session.seconds / 2)
                await asyncio.Event().wait()
            case "agent_late":
                await asyncio.sleep(LATE_S)
            case _:
                await asyncio.sleep(session.seconds)
        if fault == "agent_raises":
            raise RuntimeError("the agent's code has a defect")
        if fault == "reward_nan":
            return math.nan
        session.finished = True
        self._unfinished -= 1
        if self._unfinished == 0:
            self.half.set()
        return session.reward

    async def _run_by_s3(self, session: Session) -> None:
        """Store what the toolkit's wrapper stores."""
        asked = session.payload[REQUEST_FIELD]
        key = f"{asked['exp_id']}/{asked['input_id']}/{session.id}.json"
        try:
            reward = await self._agent(session)
            ids = tokens_of(0) if self._fault == "forged_tokens" and session.victim else tokens_of(session.proof)
            result: dict[str, Any] = {"rewards": [reward], "rollout_data": [{"token_ids": ids}]}
            result |= {"status_code": 200, "stop_reason": "end_turn"}
        except RuntimeError as error:
            result = {"status_code": 500, "stop_reason": str(error), "traceback": str(error)}
        meta = {"input_id": asked["input_id"], "s3_bucket": asked["s3_bucket"], "result_key": key}
        body = json.dumps({**result, **meta, "payload": session.payload}).encode()
        if self._fault == "truncated_object" and session.victim:
            body = body[: len(body) // 2]
        for _ in range(2 if self._fault == "published_twice" else 1):
            self._s3.put(asked["s3_bucket"], key, body)

    async def _run_by_http(self, session: Session) -> None:
        """Keep the state that the toolkit's wrapper answers to status calls."""
        try:
            reward = await self._agent(session)
        except RuntimeError as error:
            session.state = {"status": "completed", "error": str(error)}
        else:
            if math.isnan(reward):  # its store refuses to encode it
                session.state = {"status": "completed", "error": "Out of range float values are not JSON compliant"}
            else:
                session.state = {"status": "completed", "result": {"reward": reward}}

    async def _run_ours(self, session: Session) -> None:
        request = RolloutRequest.parse(session.payload[REQUEST_FIELD])
        heartbeats = asyncio.ensure_future(self._send_heartbeats(request))
        if self._fault == "foreign_container" and session.victim:
            self._write_for_another(session, request)
        try:
            assert request.remaining_s is not None
            limit = asyncio.timeout(request.remaining_s)
            async with limit:
                frozen = self._fault in ("agent_dies", "agent_freezes") and session.victim
                if frozen:
                    asyncio.get_running_loop().call_later(session.seconds / 2, heartbeats.cancel)
                    limit.reschedule(None)  # the wrapper has died or is frozen, too
                reward = await self._agent(session)
            if math.isfinite(reward):
                self._publish(session, self._rollout(session, request, reward))
            else:
                self._publish(session, _failed(request, Outcome.AGENT_ERROR, "bad_reward", "the reward is nan"))
        except RuntimeError as error:
            self._publish(session, _failed(request, Outcome.AGENT_ERROR, "exception", str(error)))
        except TimeoutError:
            self._publish(session, _failed(request, Outcome.TIMED_OUT, "agent_deadline", "the agent took too long"))
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self, request: RolloutRequest) -> None:
        url, every_s = request.endpoint.heartbeat_url, request.heartbeat_s
        if url is None or every_s is None:
            return
        self._http = self._http or aiohttp.ClientSession()
        while True:
            try:
                headers = {"Authorization": f"Bearer {request.endpoint.api_key}"}
                async with self._http.post(url, headers=headers) as reply:
                    await reply.read()
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(every_s)

    def _rollout(self, session: Session, request: RolloutRequest, reward: float) -> Rollout:
        ids = _ids(request)
        claims = SessionClaims(
            **{name: ids[name] for name in ids if name != "task_id"}, sampling=Sampling(), expires_at=request.deadline
        )
        sealed = self._sealer.seal(
            Trajectory(model=MODEL, segments=(half_sampled(tokens_of(session.proof)),)), claims
        )
        forged = self._fault == "forged_tokens" and session.victim
        return Rollout(
            **ids,
            outcome=Outcome.COMPLETED,
            reward=reward,
            model=MODEL,
            segments=(half_sampled(tokens_of(0)),) if forged else sealed.segments,
            seal=sealed.seal,
        )

    def _publish(self, session: Session, rollout: Rollout) -> None:
        """Write once and announce, as the wrapper does."""
        url, fault = session.payload[REQUEST_FIELD]["result"]["queue_url"], self._fault if session.victim else ""
        announcement = self._write(session, rollout, half=fault == "truncated_object")
        if fault != "message_lost":
            for _ in range(2 if self._fault == "published_twice" else 1):
                self._sqs.send(url, announcement.encode())
        if fault == "poison_messages":
            missing = Announcement(bucket=announcement.bucket, key=f"{announcement.key}-nothing").encode()
            for poison in ("not JSON", "{}", '{"Records": [{"other": 1}]}', '{"Records": []}', missing):
                self._sqs.send(url, poison)
        if fault == "foreign_run":  # and a rollout that was not planned
            for other in ({"run_id": "another-run"}, {"rollout_id": f"{rollout.task_id}.99"}):
                self._sqs.send(url, self._write(session, rollout.model_copy(update=other)).encode())

    def _write(self, session: Session, rollout: Rollout, *, half: bool = False) -> Announcement:
        asked, body = session.payload[REQUEST_FIELD]["result"], rollout.encode()
        key = result_key(asked["prefix"], rollout.run_id, rollout.step, rollout.rollout_id)
        if not self._s3.has(asked["bucket"], key):
            self._s3.put(asked["bucket"], key, body[: len(body) // 2] if half else body)
        return Announcement(bucket=asked["bucket"], key=key)

    def _write_for_another(self, session: Session, request: RolloutRequest) -> None:
        """Publish the result of the group's next rollout, whose id can be guessed, before its agent does."""
        name, _, number = request.rollout_id.rpartition(".")
        if number.isdigit():
            other = request.model_copy(update={"rollout_id": f"{name}.{(int(number) + 1) % 4}"})
            announcement = self._write(session, self._rollout(session, other, 1.0))
            self._sqs.send(session.payload[REQUEST_FIELD]["result"]["queue_url"], announcement.encode())


def _ids(request: RolloutRequest) -> dict[str, Any]:
    names = ("run_id", "step", "task_id", "rollout_id", "attempt", "session_id")
    return {name: getattr(request, name) for name in names}


def _failed(request: RolloutRequest, outcome: Outcome, reason: str, message: str) -> Rollout:
    return Rollout(**_ids(request), outcome=outcome, failure=Failure(reason=reason, message=message))
