"""What the tests of the dialects share: answers, and sampled messages drawn at random."""

import json
from typing import Any

from hypothesis import strategies as st

from rollout_backend.model.model_call import Answer, Choice

PROMPT_TOKENS, CACHED_TOKENS, SAMPLED_TOKENS = 11, 4, 7
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
FULL = {
    "role": "assistant",
    "content": "some text",
    "reasoning_content": "why so",
    "tool_calls": [CALL, {**CALL, "id": "2"}],
}


def answer(message: dict[str, Any], finish_reason: str = "stop", matched_stop: str | None = None) -> Answer:
    choice = Choice(message, finish_reason, SAMPLED_TOKENS, matched_stop)
    return Answer("ab", 1, "m", (choice,), PROMPT_TOKENS, CACHED_TOKENS)


def read_events(stream: bytes) -> list[tuple[str | None, dict[str, Any]]]:
    """Return server-sent events as (name, data)."""
    assert stream.endswith(b"\n\n")
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if "data" in fields:
            events.append((fields.get("event"), json.loads(fields["data"])))
    return events


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def _sampled(arguments: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw messages as the renderer parses them, whose calls have these arguments."""
    function = st.fixed_dictionaries({"name": st.text(min_size=1), "arguments": arguments})
    call = st.fixed_dictionaries({"id": st.text(min_size=1), "type": st.just("function"), "function": function})
    return st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.text()},
        optional={"reasoning_content": st.text(min_size=1), "tool_calls": st.lists(call, min_size=1, max_size=3)},
    )


RESPONSES = _sampled(st.dictionaries(st.text(), JSON, max_size=3).map(json.dumps))
ANTHROPIC = _sampled(st.dictionaries(st.text() | st.just("INVALID_JSON"), JSON, max_size=3).map(json.dumps))
