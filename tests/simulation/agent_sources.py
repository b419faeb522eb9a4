"""What agents of other protocols leave at their own source: in their container, under a key of their own in S3, or at
the gateway.

The trainer's translators and protocols are the production code.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from agent_wrapper.contract import Rollout, RolloutRequest
from rollout_backend.agents.protocols.agentcore_rl_toolkit import AgentCoreRlToolkit, AgentCoreRuntimeApp
from rollout_backend.agents.protocols.sagemaker_job_runtime import SageMakerJobRuntime
from tests.simulation.environment import Environment
from tests.simulation.s3 import Bucket

_REQUEST = "_request"  # where an invoke has the contract's request, for the simulator alone
_ENVELOPE = "_agentcore_runtime"


class Toolkit(AgentCoreRlToolkit):
    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        return {**super().payload(task, request), _REQUEST: request.model_dump(mode="json")}


class RuntimeApp(AgentCoreRuntimeApp):
    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        return {**super().payload(task, request), _REQUEST: request.model_dump(mode="json")}


class JobRuntime(SageMakerJobRuntime):
    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        return {**super().payload(task, request), _REQUEST: request.model_dump(mode="json")}


def request_in(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the contract's request in an invoke of another protocol."""
    return payload.get(_REQUEST)


def is_poll(payload: Mapping[str, Any]) -> bool:
    return _ENVELOPE in payload and payload[_ENVELOPE]["operation"] == "get"


class AgentSources:
    """The sources of a run's agents. Agents in the wrapper have none."""

    def __init__(self, env: Environment, bucket: Bucket) -> None:
        self.protocol = env.situation.protocol
        self.results: dict[str, Rollout] = {}  # by session: what an agent left, as its rollout
        self._env = env
        self._bucket = bucket
        self._states: dict[str, dict[str, Any]] = {}  # by session: the answer to a poll
        self._keys: dict[str, str] = {}  # by session: where its agent has written
        # Of the job runtime, by session: when its rollout was reported as complete, of which a trainer has read the
        # rewards, and for which one has looked a last time.
        self.completed_at: dict[str, float] = {}
        self.rewards_read: set[str] = set()
        self.last_looks: set[str] = set()
        self._answers: defaultdict[str, asyncio.Future[bool]] = defaultdict(asyncio.Future)
        self._left_at: dict[str, float] = {}
        self._polled_at: dict[str, float] = {}  # by session: when a trainer last received the answer to a poll

    def accept(self, request: RolloutRequest) -> bytes:
        """Return the container's answer to the invoke."""
        if self.protocol in ("rollout", "sagemaker-job-runtime"):
            return b'{"status": "accepted"}'
        if self.protocol == "agentcore-rl-toolkit":
            return json.dumps({"status": "processing", "result_key": Toolkit().result_key(request)}).encode()
        return self.poll(request.session_id)

    def keep(self, rollout: Rollout) -> None:
        """Keep an agent's result in its container."""
        ended = (
            {"result": {"reward": rollout.reward}} if rollout.failure is None else {"error": "a simulated failure"}
        )
        self._states[rollout.session_id] = {"status": "completed", **ended}
        self.leave(rollout)

    def write(self, key: str, rollout: Rollout) -> None:
        """Write an agent's result under its own key."""
        ended: dict[str, Any] = {"rewards": [rollout.reward], "status_code": 200}
        if rollout.failure is not None:
            ended = {"status_code": 500, "stop_reason": "a simulated failure"}
        if self._bucket.put_new(key, json.dumps(ended).encode()):
            self._keys[rollout.session_id] = key
            self.leave(rollout)

    def leave(self, rollout: Rollout) -> None:
        """Record that the agent's result is at its source."""
        self.results[rollout.session_id] = rollout
        self._left_at[rollout.session_id] = self._env.now()
        self._env.note(f"left at its source: {rollout.rollout_id} attempt {rollout.attempt} {rollout.outcome}")

    def answer(self, session_id: str, *, failed: bool) -> None:
        """Answer the invoke of an agent that answers when it has finished."""
        self._answers[session_id].set_result(failed)

    def answer_of(self, session_id: str) -> asyncio.Future[bool]:
        """Return a future of whether such an agent has failed."""
        return self._answers[session_id]

    def replace_container(self, session_id: str) -> None:
        """Forget what the session's agent did."""
        self._states[session_id] = {"status": "not_found"}
        self._left_at.pop(session_id, None)

    def poll(self, session_id: str) -> bytes:
        """Return the container's answer to a poll."""
        state = self._states.get(session_id, {"status": "in_progress"})
        return json.dumps({"version": 1, "invocation_id": session_id, **state}).encode()

    def polled(self, session_id: str) -> None:
        """Record that a trainer has received what is at the agent's source."""
        self._polled_at[session_id] = self._env.now()

    def unasked_for_s(self, session_id: str) -> float:
        """Return for how long an agent's result has been at its source without an answer from there."""
        if session_id not in self._left_at:
            return 0.0
        asked = self._polled_at.get(session_id, 0.0)
        if session_id in self._keys:
            asked = self._bucket.absent_at.get(self._keys[session_id], 0.0)
        return self._env.now() - max(asked, self._left_at[session_id])
