"""Run agents that are wrapped in an app of agentcore-rl-toolkit 0.2.0, or of its predecessor."""

import json
import re
from collections.abc import Mapping
from typing import Any

from agent_wrapper.contract import REQUEST_FIELD, ContractError, Outcome, RolloutRequest
from agent_wrapper.contract.codec import unpack
from agent_wrapper.contract.objects import TRACEBACK_CHARS
from agent_wrapper.outcome import SDK_ERRORS, AgentResult, classify, failed
from agent_wrapper.runner import Returned
from rollout_backend.agents.protocols.base import PolledResults, WrittenResults, results_prefix
from rollout_backend.agents.runtimes.http import MAX_BYTES
from rollout_backend.core.ledger import TERMINATED
from rollout_backend.errors import InvokeRejected

# Fields that the app adds, and tokens that an older app reports: only the gateway's tokens count.
_NOT_THE_AGENTS = frozenset({"status_code", "input_id", "s3_bucket", "result_key", "payload", "rollout_data"})
_INFRASTRUCTURE = frozenset({408, 429, 502, 503, 504})
# Errors that SIGTERM usually causes.
_STOPPED = frozenset({"CancelledError", "GeneratorExit", "KeyboardInterrupt", "SystemExit"})
_ERROR_LINE = re.compile(r"^(?:\w+\.)*(\w+)(?::|$)", re.MULTILINE)
_VERSION = 1
_CONFIG, _ENVELOPE = "_config", "_agentcore_runtime"
_ENDED = {
    "interrupted": "the agent's server was restarted while it ran",
    "not_found": "the session's container was replaced by a new one, which does not know the invocation",
}


class AgentCoreRlToolkit(WrittenResults):
    """Agents in `AgentCoreRLApp`.

    The invoke's `_rollout` block has `exp_id`, `input_id`, `s3_bucket`, `base_url`, `api_key` and `model_id`. Agents
    made for the toolkit's main branch send the key; older ones send a fixed text, and need it in the path of
    `base_url`. The agent answers `{"status": "processing"}` at once, and writes one JSON object:

        EXP_ID/INPUT_ID/SESSION_ID.json
        {"rewards": [1.0], "status_code": 200, "stop_reason": "end_turn", "input_id": ..., "payload": ..., ...}

    The agent may overwrite the object, so it must not be the rollout's own. `payload` repeats the invoke, with its
    key.
    """

    names_key = True
    """Whether the answer names the result's key."""

    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        sampling = request.sampling
        params = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.max_tokens is not None:
            params["max_completion_tokens"] = sampling.max_tokens
        block = {
            "exp_id": results_prefix(request).removesuffix("/"),
            "input_id": request.rollout_id,
            "s3_bucket": request.result.bucket,
            "base_url": request.endpoint.base_url,
            "api_key": request.endpoint.api_key,
            "model_id": request.endpoint.name,
            "sampling_params": params,
        }
        return {**task, REQUEST_FIELD: block}

    def check_accepted(self, answer: bytes, request: RolloutRequest) -> None:
        try:
            fields = json.loads(answer)
            accepted = fields["status"] == "processing"
        except (ValueError, KeyError, TypeError, RecursionError):
            accepted = False
        if not accepted:
            raise InvokeRejected(
                f"the agent answered {answer[:200]!r} instead of 'processing': is it wrapped in AgentCoreRLApp, with "
                "@app.rollout_entrypoint? For an agent in RolloutApp, leave out runtime.agent_protocol",
                reason="not_a_rollout_app",
            )
        if self.names_key and fields.get("result_key") != self.result_key(request):
            raise InvokeRejected(
                f"the agent writes its result to {fields.get('result_key')!r} instead of "
                f"{self.result_key(request)!r}: deploy it with agentcore-rl-toolkit 0.2.0",
                reason="not_a_rollout_app",
            )

    def result_key(self, request: RolloutRequest) -> str:
        return f"{results_prefix(request)}{request.rollout_id}/{request.session_id}.json"

    def read_result(self, data: bytes, max_bytes: int) -> AgentResult:
        fields = unpack(data, max_bytes)
        status = fields.get("status_code", 200)
        if not isinstance(status, int) or isinstance(status, bool):
            raise ContractError("status_code", f"is {status!r}, which is not a whole number")
        if status != 200:
            return _error(status, str(fields.get("stop_reason", "")), fields.get("traceback"))
        value = {name: field for name, field in fields.items() if name not in _NOT_THE_AGENTS}
        if "reward" not in value and "rewards" in value:
            # `rewards` is a number, or a list whose last entry is the rollout's reward.
            rewards = value.pop("rewards")
            value["reward"] = rewards[-1] if isinstance(rewards, list) and rewards else rewards
        return classify(Returned(value), "")


class Verl4216(AgentCoreRlToolkit):
    """Agents for verl's pull request 4216, from which the toolkit developed.

    They get a `_training` block with `exp_id`, `session_id`, `input_id`, `sqs_url` and `s3_bucket`, write the
    toolkit's result under another key, and announce it. If the announcement fails, they replace the result by an
    error:

        EXP_ID/INPUT_ID_SESSION_ID.json

    The buffer drops the announcement, because results of other protocols are found by listing. The block also names
    the model's address. An agent that reads it from its environment has one address for all sessions, and cannot be
    run.
    """

    names_key = False

    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        fields = super().payload(task, request)
        block = fields.pop(REQUEST_FIELD)
        return {
            **fields,
            "_training": {**block, "session_id": request.session_id, "sqs_url": request.result.queue_url},
        }

    def result_key(self, request: RolloutRequest) -> str:
        return f"{results_prefix(request)}{request.rollout_id}_{request.session_id}.json"


def _error(status: int, message: str, trace: object) -> AgentResult:
    # The end of a traceback names the error.
    trace = trace[-TRACEBACK_CHARS:] if isinstance(trace, str) else None
    classes = _ERROR_LINE.findall(trace or "")
    if classes and classes[-1] in _STOPPED:
        return failed(Outcome.INFRA_ERROR, TERMINATED, f"the agent was stopped: {classes[-1]}", trace)
    if SDK_ERRORS & {*classes}:
        return failed(Outcome.INFRA_ERROR, "model_unavailable", message, trace)
    outcome = Outcome.INFRA_ERROR if status in _INFRASTRUCTURE else Outcome.AGENT_ERROR
    return failed(outcome, "status_code", f"the agent wrote status code {status}: {message}", trace)


class AgentCoreRuntimeApp(PolledResults):
    """Agents in `AgentCoreRuntimeApp`.

    The invoke's `_config` block has `base_url`, `api_key` and `model_id`. Its `_agentcore_runtime` block starts the
    agent in the background under an invocation id, here the session's, and later asks for the state of that
    invocation:

        {"version": 1, "operation": "start", "invocation_id": ..., "background": true}
        {"version": 1, "operation": "get", "invocation_id": ...}

    The app answers both with the state, which contains the agent's return value or its error once it has completed:

        {"version": 1, "invocation_id": ..., "status": "in_progress" | "completed" | "interrupted" | "not_found", ...}

    The app keeps states only in files of its container. A repeated start has no effect.
    """

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
        if len(answer) >= MAX_BYTES:
            # Only the state of a completed invocation is this long.
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
