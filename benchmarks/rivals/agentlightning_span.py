"""The spans in which agentlightning's store keeps what agents report."""

from __future__ import annotations

import time
import uuid
from typing import Any

from agentlightning.types import OtelResource, Span, TraceStatus


def make_span(rollout_id: str, attempt_id: str, sequence: int, name: str, attributes: dict[str, Any]) -> Span:
    """Return a finished span of an attempt; `sequence` is its number there."""
    now = time.time()
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence,
        trace_id=uuid.uuid4().hex,
        span_id=uuid.uuid4().hex[:16],
        parent_id=None,
        name=name,
        status=TraceStatus(status_code="OK"),
        attributes=attributes,
        events=[],
        links=[],
        start_time=now,
        end_time=now,
        context=None,
        parent=None,
        resource=OtelResource(attributes={}, schema_url=""),
    )
