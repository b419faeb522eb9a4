"""Export spans of model calls, with the attributes of OpenTelemetry's conventions for generative AI."""

import re
import secrets
import time

from agent_wrapper.contract.keys import trace_ids
from rollout_backend.base import tracing
from rollout_backend.base.tracing import SpanSender
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.gateway.sessions.calls import InFlightCall
from rollout_backend.model.model_call import ApiError

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class CallTraces:
    """Exports a span for each model call of one gateway."""

    def __init__(self, endpoint: str) -> None:
        """Raise ConfigError unless the extra `otel` is installed."""
        self._sender = SpanSender(endpoint, "rollout-gateway")

    def send(self, claims: SessionClaims, running: InFlightCall, began: float, traceparent: str) -> None:
        """Export the span of a finished call that started at `began` (unix seconds).

        `traceparent` is the header of the agent's request, or empty. If its span belongs to the rollout's trace, it
        becomes the parent of the new span; a span of another trace is linked.
        """
        trace_id, parent_id = trace_ids(claims.run_id, claims.step, claims.rollout_id)
        links: tuple[tuple[int, int], ...] = ()
        if sent := _TRACEPARENT.fullmatch(traceparent):
            caller = int(sent[1], 16), int(sent[2], 16)
            if caller[0] == trace_id:
                parent_id = caller[1] or parent_id
            elif all(caller):
                links = (caller,)
        error = _error(running)
        attributes = _attributes(claims, running) | ({tracing.ERROR_TYPE: error} if error else {})
        span = tracing.Span(
            f"chat {running.call.model}",
            trace_id,
            secrets.randbits(64) or 1,
            parent_id,
            began,
            time.time(),
            attributes,
            "client",
            error,
            links,
        )
        self._sender.send([span])

    def close(self) -> None:
        self._sender.close()


def _error(running: InFlightCall) -> str:
    """Return the code of a call's error; empty for an answered call. The message could quote a prompt."""
    if running.task.cancelled():
        # The client disconnected, or the session was closed.
        return "cancelled"
    error = running.task.exception()
    if error is None:
        return ""
    return error.code if isinstance(error, ApiError) else type(error).__name__


def _attributes(claims: SessionClaims, running: InFlightCall) -> dict[str, tracing.Value]:
    call, sampling = running.call, claims.sampling
    found: dict[str, tracing.Value] = {
        tracing.OPERATION: "chat",
        tracing.PROVIDER: "sglang",
        tracing.CONVERSATION: claims.session_id,
        tracing.REQUEST_MODEL: call.model,
        tracing.REQUEST_TEMPERATURE: sampling.temperature,
        tracing.REQUEST_TOP_P: sampling.top_p,
        tracing.REQUEST_CHOICES: call.n,
        tracing.REQUEST_STREAM: call.stream,
        tracing.RUN_ID: claims.run_id,
        tracing.STEP: claims.step,
        tracing.ROLLOUT_ID: claims.rollout_id,
        tracing.ATTEMPT: claims.attempt,
        tracing.SESSION_ID: claims.session_id,
    }
    if call.max_new_tokens is not None:
        found[tracing.REQUEST_MAX_TOKENS] = call.max_new_tokens
    if running.answered:
        answer = running.outcome()
        found |= {
            tracing.RESPONSE_ID: answer.id,
            tracing.RESPONSE_MODEL: answer.model,
            tracing.FINISH_REASONS: [choice.finish_reason for choice in answer.choices],
            tracing.INPUT_TOKENS: answer.prompt_tokens,
            tracing.OUTPUT_TOKENS: answer.sampled_tokens,
        }
        if answer.cached_tokens is not None:
            found[tracing.CACHED_TOKENS] = answer.cached_tokens
    return found
