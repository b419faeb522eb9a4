"""Spans of a trace, and the names of their attributes. No span holds a prompt, a reply, a payload or a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
