"""Derive the ids of a rollout's OpenTelemetry trace from the rollout's ids, so that no request carries them."""

import hashlib


def trace_ids(run_id: str, step: int, rollout_id: str) -> tuple[int, int]:
    """Return the id of a rollout's trace, and of the span that is the parent of all its other spans."""
    digest = hashlib.sha256(f"trace of {run_id}/{step}/{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


def traceparent(run_id: str, step: int, rollout_id: str) -> str:
    """Return the W3C Trace Context header that makes a span a child of the rollout's span."""
    trace_id, span_id = trace_ids(run_id, step, rollout_id)
    return f"00-{trace_id:032x}-{span_id:016x}-01"
