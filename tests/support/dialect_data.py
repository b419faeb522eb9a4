"""What the tests of the dialects share: answers, sampled messages drawn at random, and spoiled requests."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import Answer, Choice, ModelCall
from rollout_backend.dialects.base import Dialect

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


def sampled(arguments: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw messages as the renderer parses them, whose calls have these arguments."""
    function = st.fixed_dictionaries({"name": st.text(min_size=1), "arguments": arguments})
    call = st.fixed_dictionaries({"id": st.text(min_size=1), "type": st.just("function"), "function": function})
    return st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.text()},
        optional={"reasoning_content": st.text(min_size=1), "tool_calls": st.lists(call, min_size=1, max_size=3)},
    )


@st.composite
def _spoiled(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """Draw the body with one value replaced or removed."""
    copy = json.loads(json.dumps(whole))
    at = copy
    while True:
        key = draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
            at = at[key]
            continue
        if draw(st.booleans()):
            del at[key]
        else:
            at[key] = draw(JSON)
        return json.dumps(copy).encode()


def bodies(whole: dict[str, Any]) -> st.SearchStrategy[bytes]:
    return st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | _spoiled(whole)


def check_read_or_refused(dialect: Dialect, parse: Callable[[bytes], ModelCall], body: bytes) -> None:
    """Check that the body becomes a call that can be sent as JSON, or is refused with 400."""
    error = None
    try:
        call = parse(body)
    except ApiError as refused:
        error = refused
    if error is not None:
        assert error.status == 400
        assert json.dumps(dialect.error_body(error), ensure_ascii=False).encode()
    else:
        parts = [call.messages, call.tools, call.json_schema, call.dialect_data]
        json.dumps(parts, ensure_ascii=False, allow_nan=False, default=vars).encode()
