"""Build the spans of a rollout from its record and its result. Pure.

Invariant: ids are derived from the rollout and the span's name, so reporting a rollout again replaces its spans.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent_wrapper.contract import Rollout
from agent_wrapper.contract.keys import trace_ids
from rollout_backend.base.tracing import (
    ANNOUNCED,
    ATTEMPTS,
    GROUP_USABLE,
    OPERATION,
    OUTCOME,
    REASON,
    REPLACEMENT,
    REWARD,
    ROLLOUT_ID,
    RUN_ID,
    SAMPLED_TOKENS,
    SEGMENTS,
    SESSION_ID,
    STEP,
    TASK_ID,
    TRAINABLE,
    TURNS,
    WEIGHT_VERSIONS,
    Kind,
    Span,
    Value,
)
from rollout_backend.run.accounts.records import RolloutRecord


@dataclass(frozen=True)
class Delivery:
    """The arrival of a result: the time of its announcement, if any, and the duration of its fetch and validation."""

    announced_at: float | None
    fetch_s: float


def rollout_spans(
    run_id: str, record: RolloutRecord, rollout: Rollout | None = None, delivery: Delivery | None = None
) -> Iterator[Span]:
    """Yield the span of a rollout and the spans of its phases. `rollout` is the result that settled it.

    Times within the container use its clock. If a phase starts after its end by that clock, its span is empty.
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
