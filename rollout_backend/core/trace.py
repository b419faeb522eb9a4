"""The spans of a rollout's trace, from its record and its result. Pure.

Invariants:

- Ids follow from the rollout and the span's name, so a rollout that is reported again replaces its spans.
- No span holds a prompt, a reply, a payload or a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agent_wrapper.contract import Rollout
from agent_wrapper.contract.trace import trace_ids
from rollout_backend.core.records import RolloutRecord

RUN_ID = "rl.run_id"
STEP = "rl.step"
TASK_ID = "rl.task_id"
ROLLOUT_ID = "rl.rollout_id"
ATTEMPT = "rl.attempt"
ATTEMPTS = "rl.attempts"
SESSION_ID = "rl.session_id"
OUTCOME = "rl.outcome"
REASON = "rl.reason"
REWARD = "rl.reward"
TRAINABLE = "rl.trainable"
GROUP_USABLE = "rl.group_usable"
REPLACEMENT = "rl.replacement"
SEGMENTS = "rl.segments"
TURNS = "rl.turns"
SAMPLED_TOKENS = "rl.sampled_tokens"
WEIGHT_VERSIONS = "rl.weight_versions"
ANNOUNCED = "rl.announced"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

Kind = Literal["internal", "client", "producer", "consumer"]
Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True)
class Span:
    """One span. `error` says why it failed; it is empty for success. Times in unix seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    kind: Kind = "internal"
    error: str = ""
    links: tuple[tuple[int, int], ...] = ()  # trace and span, of other traces


@dataclass(frozen=True)
class Delivery:
    """How a result arrived: when it was announced, if it was, and how long its fetch and validation took."""

    announced_at: float | None
    fetch_s: float


def rollout_spans(
    run_id: str, record: RolloutRecord, rollout: Rollout | None = None, delivery: Delivery | None = None
) -> Iterator[Span]:
    """Yield the span of a rollout, and those of its phases. `rollout` is the result that settled it.

    Times within the container are by its clock. A span of a phase that began after it ended by that clock is empty.
    """
    end = record.settled_at
    if end is None:
        return
    trace_id, root = trace_ids(run_id, record.step, record.rollout_id)
    error = f"{record.outcome}: {record.reason}" if record.failed else ""
    yield Span(
        "rollout", trace_id, root, None, record.planned_at, end, _attributes(run_id, record, rollout), error=error
    )

    def span(
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
        kind: Kind = "internal",
        error: str = "",
    ) -> Span:
        span_id = int.from_bytes(hashlib.sha256(f"{trace_id:x}/{name}".encode()).digest()[:8], "big")
        return Span(name, trace_id, span_id, root, start, max(start, end), attributes or {}, kind, error)

    invoked, accepted = record.invoked_at, record.accepted_at
    yield span("wait for a session", record.planned_at, end if invoked is None else invoked)
    session: dict[str, Value] = {SESSION_ID: record.session_ids[-1]} if record.session_ids else {}
    if invoked is not None and (accepted is not None or rollout is None):
        failed = error if accepted is None else ""
        yield span("invoke", invoked, end if accepted is None else accepted, session, "client", failed)
    agent: dict[str, Value] = {OPERATION: "invoke_agent", **session}
    if rollout is None:
        if accepted is not None:
            yield span("invoke_agent", accepted, end, agent, error=error)
        return
    if not rollout.started_at or not rollout.finished_at:
        return
    yield span("invoke_agent", rollout.started_at, rollout.finished_at, agent, error=error)
    if delivery is None or record.result_at is None:
        return
    fetching = record.result_at - delivery.fetch_s
    announced = delivery.announced_at
    published = {ANNOUNCED: announced is not None}
    yield span("publish", rollout.finished_at, fetching if announced is None else announced, published, "producer")
    if announced is not None:
        yield span("queue", announced, fetching, kind="consumer")
    yield span("fetch", fetching, record.result_at, kind="client")


def _attributes(run_id: str, record: RolloutRecord, rollout: Rollout | None) -> dict[str, Value]:
    found: dict[str, Value] = {
        RUN_ID: run_id,
        STEP: record.step,
        TASK_ID: record.task_id,
        ROLLOUT_ID: record.rollout_id,
        ATTEMPTS: record.attempts,
        OUTCOME: str(record.outcome),
        TRAINABLE: record.trainable,
        GROUP_USABLE: record.group_usable,
        REPLACEMENT: record.is_replacement,
    }
    if record.reason:
        found[REASON] = record.reason
    if record.reward is not None:
        found[REWARD] = record.reward
    if record.result is not None:
        found[SEGMENTS] = record.result.segments
        found[TURNS] = record.result.turns
        found[SAMPLED_TOKENS] = record.result.sampled_tokens
    if rollout is not None:
        turns = (turn for segment in rollout.segments for turn in segment.turns)
        found[WEIGHT_VERSIONS] = sorted({each.version for turn in turns for each in turn.weight_versions})
    return found
