import copy

import pytest

from rollout_backend.gateway.conversations import Conversations
from rollout_backend.gateway.engine_client import Completion
from rollout_backend.rendering.renderer import load_renderer

U1, U2, U3 = ({"role": "user", "content": f"question {n}"} for n in (1, 2, 3))
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}


@pytest.fixture
def session(bundle) -> Conversations:
    return Conversations(bundle)


@pytest.fixture
def say(bundle):
    """One whole call: what `text` the model samples, and the reply the agent gets; returns why a segment opened."""

    def call(session, messages, text="A", tools=None, **reply):
        prompt = session.prepare(messages, tools)
        ids = bundle.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        completion = Completion(tuple(ids), (None,) * len(ids), (), "stop", None, 0, 0.0)
        return session.record(prompt, completion, {"role": "assistant", "content": text, **reply}).opened

    return call


A = {"role": "assistant", "content": "A"}


def test_a_continued_conversation_is_one_segment(session, say):
    assert say(session, [SYSTEM, U1]) == "first_call"
    assert say(session, [SYSTEM, U1, A, U2]) is None
    assert say(session, [SYSTEM, U1, A, U2, A, U3]) is None
    assert len(session.recorder) == 1


def test_the_sampled_tokens_are_kept_even_if_the_reply_would_render_otherwise(session, say, bundle):
    say(session, [U1], text="  A <|endoftext|>", content="A")
    prompt = session.prepare([U1, A, U2], None)
    assert "  A <|endoftext|><|im_end|>" in bundle.decode(prompt.ids)


def test_another_spelling_of_the_same_history_is_the_same(session, say):
    reply = {"content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    say(session, [U1], tools=TOOLS, **reply)
    call = copy.deepcopy(CALL)
    call["function"]["arguments"] = '{"b":2,"a":1}'
    echoed = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert say(session, [U1, echoed, result], tools=TOOLS) is None


def other_ids(text: str) -> list[dict]:
    call = {**CALL, "id": "call_of_the_agents_own"}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": text},
    ]


def test_a_call_that_comes_back_with_another_id_is_the_same_where_ids_are_not_rendered(session, say, bundle):
    assert not bundle.renders_call_ids
    say(session, [U1], tools=TOOLS, content=None, tool_calls=[CALL])
    assert say(session, [U1, *other_ids("3")], tools=TOOLS) is None
    assert say(session, [U1, *other_ids("4")], tools=TOOLS) == "branched"


def test_ids_that_are_rendered_are_compared(bundle, say, monkeypatch):
    monkeypatch.setitem(vars(bundle), "renders_call_ids", True)
    session = Conversations(bundle)
    say(session, [U1], tools=TOOLS, content=None, tool_calls=[CALL])
    assert say(session, [U1, *other_ids("3")], tools=TOOLS) == "history_rewritten"


def test_a_result_of_another_tool_is_not_the_same(session, say):
    f, g = CALL, {**CALL, "id": "c2", "function": {**CALL["function"], "name": "g"}}
    called = {"role": "assistant", "content": "", "tool_calls": [f, g]}
    results = [{"role": "tool", "tool_call_id": n, "content": "3"} for n in ("c1", "c2")]
    say(session, [U1], tools=TOOLS, content=None, tool_calls=[f, g])
    say(session, [U1, called, *results], tools=TOOLS)
    assert say(session, [U1, called, *results, A, U2], tools=TOOLS) is None
    assert say(session, [U1, called, *reversed(results), A, U2], tools=TOOLS) == "history_rewritten"


DEFAULTS = {"a": {"default": 1}, "b": {}, "c": {"default": False}, "d": {"default": [1]}, "e": True}


@pytest.mark.parametrize(
    ("sampled", "echoed", "same"),
    [
        ('{"b": 2}', '{"a": 1, "b": 2, "c": false, "d": [1]}', True),
        ('{"a": 1, "b": 2}', '{"b": 2}', True),
        ('{"b": 2}', '{"b": 2, "c": 0}', False),
        ('{"b": 2}', '{"b": 2, "c": true}', False),
        ('{"b": 2}', '{"b": 2, "e": 1}', False),
        ('{"b": 2}', "[1]", False),
        ('{"b": ', '{"b": ', True),
    ],
)
def test_the_defaults_of_a_tool_filled_in_are_no_other_call(session, say, sampled, echoed, same):
    """As command-line agents do that check a call's arguments before they run it."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": DEFAULTS}}}]

    def call(arguments: str) -> list[dict]:
        return [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]

    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    say(session, [U1], tools=tools, content=None, tool_calls=call(sampled))
    again = [U1, {"role": "assistant", "content": "", "tool_calls": call(echoed)}, result]
    assert say(session, again, tools=tools) == (None if same else "history_rewritten")


def test_a_later_reply_that_was_edited_is_a_rewritten_history(session, say):
    say(session, [U1])
    say(session, [U1, A, U2])
    edited = {"role": "assistant", "content": "edited"}
    assert say(session, [U1, A, U2, edited, U3]) == "history_rewritten"


@pytest.mark.parametrize("parameters", [None, True, {"properties": []}, {"properties": {"a": True}}])
def test_schemas_without_properties_have_no_defaults(session, say, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    say(session, [U1], tools=tools)
    assert say(session, [U1, A, U2], tools=tools) is None


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([U1], None, "branched"),
        ([U1, A, U2], None, "branched"),
        ([U1, {"role": "assistant", "content": "edited"}, U2], None, "history_rewritten"),
        ([U1, U2], None, "history_rewritten"),
        ([U2], None, "new_conversation"),
        ([SYSTEM, U1], None, "new_conversation"),
        ([U1, A, U2], TOOLS, "tools_changed"),
    ],
)
def test_what_does_not_continue_says_why(session, say, messages, tools, reason):
    say(session, [U1])
    say(session, [U1, A, U2])
    assert say(session, messages, tools=tools) == reason


def test_a_system_message_in_common_is_not_a_conversation_in_common(session, say):
    say(session, [SYSTEM, U1])
    assert say(session, [SYSTEM, U2]) == "new_conversation"
    assert say(session, [SYSTEM]) == "history_rewritten" or len(session.recorder) == 3


def test_a_renderer_that_cannot_extend_renders_anew(byte_model, say):
    session = Conversations(load_renderer(byte_model.model_copy(update={"renderer": "default"})))
    assert say(session, [U1], text="A ") == "first_call"
    assert say(session, [U1, A | {"content": "A "}, U2]) is None  # this template happens to give the same tokens
    edited = session.recorder.segments()
    assert len(edited) == 1


def test_a_rendering_that_differs_opens_a_segment(byte_model, say):
    session = Conversations(load_renderer(byte_model.model_copy(update={"renderer": "default"})))
    say(session, [U1], text="A<|endoftext|>", content="A")
    assert say(session, [U1, A, U2]) == "rerendered"
