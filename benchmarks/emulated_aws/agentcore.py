"""AgentCore's data plane, with agents that publish ready-made results."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from agent_wrapper.contract import REQUEST_FIELD, Announcement, ResultTarget, RolloutRequest, result_key
from emulated_aws.http_server import Answer, Request, Response, json_response
from emulated_aws.ready_made import ReadyMadeResults
from emulated_aws.s3 import S3
from emulated_aws.sqs import ACCOUNT, REGION, Sqs

ARN = f"arn:aws:bedrock-agentcore:{REGION}:{ACCOUNT}:runtime/load-0123456789"
SESSION = b"x-amzn-bedrock-agentcore-runtime-session-id"


class DataPlane:
    """Invokes and stops of sessions. The control plane answers AccessDenied."""

    def __init__(self, latency_s: float, calls: Counter[str]) -> None:
        self._latency_s, self._calls = latency_s, calls

    def handle(self, request: Request, answer: Answer) -> None:
        session_id, path = request.text(SESSION), request.path
        if path.endswith("/invocations"):
            self._calls["InvokeAgentRuntime"] += 1
            value = self.invoke(session_id, json.loads(request.body))
            answer(json_response(200, value, f"{SESSION.decode()}: {session_id}\r\n"), self._latency_s)
        elif path.endswith(("/stopruntimesession", "/stop")):
            self._calls["StopRuntimeSession"] += 1
            stopped = {"runtimeSessionId": session_id, "statusCode": 200}
            found = (
                json_response(200, stopped) if self.stop(session_id) else refused(404, "ResourceNotFoundException")
            )
            answer(found, self._latency_s)
        else:
            self._calls["control plane"] += 1
            answer(refused(403, "AccessDeniedException"), self._latency_s)

    def invoke(self, session_id: str, payload: Any) -> Any:
        """Return the answer of the session's container."""
        raise NotImplementedError

    def stop(self, session_id: str) -> bool:
        """Return whether the session was open."""
        raise NotImplementedError


class AgentCore(DataPlane):
    """Sessions whose agents run here, and publish ready-made results."""

    def __init__(self, s3: S3, sqs: Sqs, results: ReadyMadeResults, options: Any, calls: Counter[str]) -> None:
        self._s3 = s3
        self._sqs = sqs
        self._results = results
        super().__init__(options.invoke_s, calls)
        self._agent_s, self._spread = options.agent_s, options.spread
        self._random = random.Random(0)
        self._sessions: dict[str, asyncio.TimerHandle | None] = {}
        self.invoked: list[float] = []
        self.stopped: list[float] = []
        self.published: dict[str, float] = {}  # keys

    def invoke(self, session_id: str, payload: Any) -> Any:
        if session_id not in self._sessions:
            self._begin(session_id, lambda: self._publish(session_id, payload[REQUEST_FIELD]))
        return {"status": "accepted"}

    def _begin(self, session_id: str, end: Callable[[], None]) -> None:
        self.invoked.append(time.monotonic())
        seconds = self._agent_s * (1 + self._spread * (2 * self._random.random() - 1))
        self._sessions[session_id] = asyncio.get_running_loop().call_later(seconds, end)

    def _publish(self, session_id: str, fields: dict[str, Any]) -> None:
        """Store and announce the result. The fields are the trainer's own, and not checked again."""
        self._sessions[session_id] = None
        target = fields["result"]
        request = RolloutRequest.model_construct(**{**fields, "result": ResultTarget.model_construct(**target)})
        key = result_key(target["prefix"], request.run_id, request.step, request.rollout_id)
        if self._s3.has(target["bucket"], key):
            return
        self._s3.put(target["bucket"], key, *self._results.make(request, time.time()))
        self.published[key] = time.monotonic()
        if target["queue_url"] is not None:
            self._sqs.send(target["queue_url"], Announcement(bucket=target["bucket"], key=key).encode())

    def stop(self, session_id: str) -> bool:
        if session_id not in self._sessions:
            return False
        timer = self._sessions.pop(session_id)
        if timer is not None:
            timer.cancel()
        self.stopped.append(time.monotonic())
        return True

    def reset(self) -> None:
        self.invoked, self.stopped, self.published = [], [], {}


def refused(status: int, code: str) -> Response:
    return json_response(status, {"message": code}, f"x-amzn-ErrorType: {code}\r\n")
