"""Run agents that are wrapped in `AgentCoreRuntimeApp` of agentcore-rl-toolkit 0.2.0.

The invoke's `_config` block has `base_url`, `api_key` and `model_id`. Its `_agentcore_runtime` block starts the agent
in the background under an invocation id, and later asks for the state of that invocation:

    {"version": 1, "operation": "start", "invocation_id": ..., "background": true}
    {"version": 1, "operation": "get", "invocation_id": ...}

The app answers both with the state, which contains the agent's return value or its error once it has completed:

    {"version": 1, "invocation_id": ..., "status": "in_progress" | "completed" | "interrupted" | "not_found", ...}

The app keeps states only in files of its container. A repeated start has no effect.
"""

import json
from collections.abc import Mapping
from typing import Any

from agent_wrapper.contract import ContractError, Outcome, RolloutRequest
from agent_wrapper.contract.codec import unpack
from agent_wrapper.outcome import AgentResult, classify, failed
from agent_wrapper.runner import Returned
from rollout_backend.agent_protocols.base import PolledResults
from rollout_backend.core.ledger import TERMINATED
from rollout_backend.errors import InvokeRejected
from rollout_backend.runtimes.http import MAX_BYTES

_VERSION = 1
_CONFIG, _ENVELOPE = "_config", "_agentcore_runtime"
_ENDED = {
    "interrupted": "the agent's server was restarted while it ran",
    "not_found": "the session's container was replaced by a new one, which does not know the invocation",
}


class AgentCoreRuntimeApp(PolledResults):
    """The payloads and the states of `AgentCoreRuntimeApp`. The invocation has the id of its session."""

    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        reserved = task.keys() & {_CONFIG, _ENVELOPE}
        if reserved:
            raise InvokeRejected(
                f"the task's payload has the field {min(reserved)!r}, which the toolkit reserves: rename it"
            )
        endpoint = request.endpoint
        config = {"base_url": endpoint.base_url, "model_id": endpoint.name, "api_key": endpoint.api_key}
        return {**task, _CONFIG: config, _ENVELOPE: {**_envelope("start", request), "background": True}}

    def check_accepted(self, answer: bytes, request: RolloutRequest) -> None:
        if _status(answer, request) is None:
            raise InvokeRejected(
                f"the agent answered {answer[:200]!r} instead of the invocation's state: is it wrapped in "
                "AgentCoreRuntimeApp of agentcore-rl-toolkit 0.2.0, with @app.entrypoint? For an agent in "
                "AgentCoreRLApp, set runtime.agent_protocol=agentcore-rl-toolkit; for one in RolloutApp, omit it",
                reason="not_a_rollout_app",
            )

    def poll(self, request: RolloutRequest) -> dict[str, Any]:
        return {_ENVELOPE: _envelope("get", request)}

    def has_ended(self, answer: bytes, request: RolloutRequest) -> bool:
        if len(answer) >= MAX_BYTES:  # only the state of a completed invocation is so long
            return True
        return _status(answer, request) not in (None, "in_progress")

    def read_result(self, data: bytes, max_bytes: int) -> AgentResult:
        if len(data) >= MAX_BYTES:
            raise ContractError(
                "result",
                f"has more than {MAX_BYTES // 1024} KiB, the limit of an answer: return less",
            )
        state = unpack(data, max_bytes)
        if state["status"] in _ENDED:
            return failed(Outcome.INFRA_ERROR, TERMINATED, _ENDED[state["status"]])
        if "error" in state:
            return failed(Outcome.AGENT_ERROR, "invocation_error", f"the agent raised: {state['error']}")
        return classify(Returned(state.get("result")), "")


def _envelope(operation: str, request: RolloutRequest) -> dict[str, Any]:
    return {"version": _VERSION, "operation": operation, "invocation_id": request.session_id}


def _status(answer: bytes, request: RolloutRequest) -> str | None:
    """Return the status in the state of the request's invocation; None if the answer is no such state."""
    try:
        state = json.loads(answer)
        if (state["version"], state["invocation_id"]) != (_VERSION, request.session_id):
            return None
        status = state["status"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return status if status in ("in_progress", "completed", *_ENDED) else None
