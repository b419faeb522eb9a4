import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import user
from rollout_backend.model.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.model.dialects.base import Dialect, separators, whole_characters
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.dialects.openai_responses import OpenAIResponses
from rollout_backend.model.dialects.registry import DIALECTS

STRINGS = "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content }}{% endif %}{% endfor %}"
LISTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
MACRO = "{% macro text(content) %}{% for item in content %}{{ item.text }}{% endfor %}{% endmacro %}"


def parts(kind: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]


CALLED = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
CHAT = [
    {"role": "system", "content": parts("text")},
    {"role": "user", "content": parts("text")},
    {"role": "assistant", "content": parts("text"), "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "1", "content": parts("text")},
]
ITEMS = [
    {"role": "developer", "content": parts("input_text")},
    {"role": "user", "content": parts("input_text")},
    {"role": "assistant", "content": parts("output_text")},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": parts("input_text")},
]
TURNS = [
    {"role": "user", "content": parts("text")},
    {"role": "assistant", "content": [*parts("text"), {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": parts("text")}]},
]


@pytest.mark.parametrize(
    ("engine", "template", "chat", "responses", "messages"),
    [
        ("sglang", STRINGS, ["a b", "a b", "ab", "a b"], ["a b", "a b", "ab", "ab"], ["a\nb", "a b", "ab", "a b"]),
        ("sglang", LISTS, ["ab", "ab", "ab", "a b"], ["ab", "ab", "ab", "ab"], ["a\nb", "ab", "ab", "a b"]),
        (
            "vllm",
            STRINGS,
            ["a\nb", "a\nb", "ab", "a\nb"],
            ["a\nb", "a\nb", "ab", "a\nb"],
            ["ab", "a\nb", "ab", "a\nb"],
        ),
        ("vllm", LISTS, ["ab", "ab", "ab", "a\nb"], ["ab", "ab", "ab", "a\nb"], ["ab", "ab", "ab", "a\nb"]),
    ],
)
def test_text_parts_are_joined_as_the_engine_does(engine, template, chat, responses, messages):
    def contents(dialect: type[Dialect], **body) -> list[str]:
        call = dialect(None, separators(engine, template)).parse(json.dumps({"model": "m", **body}).encode())
        return [message["content"] for message in call.messages]

    assert contents(OpenAIChat, messages=CHAT) == chat
    assert contents(OpenAIResponses, input=ITEMS) == responses
    assert contents(AnthropicMessages, max_tokens=1, system=parts("text"), messages=TURNS) == messages


@pytest.mark.parametrize(
    ("template", "sglang", "vllm"),
    [
        (None, " ", "\n"),
        (MACRO, " ", ""),
        (MACRO + "{% if item.type == 'image' %}", "", ""),
        ({"default": STRINGS, "tool_use": LISTS}, "", ""),
    ],
)
def test_engines_recognize_templates_that_take_lists(template, sglang, vllm):
    assert (separators("sglang", template).message, separators("vllm", template).message) == (sglang, vllm)


def replaced(text: str) -> str:
    """Join pairs of surrogates, as JSON's parsers do, and replace halves."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(st.text(st.sampled_from('a\\"\n\ud83d\ude00\ud800\udfff\U0001f600u')))
def test_halves_of_surrogate_pairs_are_replaced_in_any_text(text):
    for body in (json.dumps({text: text}), json.dumps(json.dumps({text: text}))):
        expected = json.loads(body) if body[0] == '"' else {replaced(text): replaced(text)}
        assert json.loads(whole_characters(body.encode())) == expected
    assert b"\\uD83D\\uDe00" in whole_characters(rb'"\uD83D\uDe00\uD83D"')


@pytest.mark.parametrize("half", [r"\ud83d", r"\uDE00", r"\ude00\ud83d"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_half_a_surrogate_pair_is_accepted_and_counted_in_every_api(dialect, half):
    parameters = {"type": "object", "description": "HALF"}
    chat = {"type": "function", "function": {"name": "f", "description": "HALF", "parameters": parameters}}
    body = {
        "/chat/completions": {"messages": [{"role": "system", "content": "HALF"}, user("HALF")], "tools": [chat]},
        "/responses": {
            "instructions": "HALF",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "HALF"}]}],
            "tools": [{"type": "function", "name": "f", "description": "HALF", "parameters": parameters}],
        },
        "/messages": {
            "max_tokens": 9,
            "system": "HALF",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "HALF"}]}],
            "tools": [{"name": "f", "description": "HALF", "input_schema": parameters}],
        },
        "/completions": {"prompt": "HALF"},
    }[dialect.path]
    sent = json.dumps({"model": "m", **body})
    call, plain = (
        dialect().parse(sent.replace("HALF", text).encode()) for text in (half, "\ufffd" * half.count("u"))
    )
    assert "lone_surrogate" in call.ignored
    assert replace(call, ignored=plain.ignored) == plain
    assert "lone_surrogate" not in dialect().parse(sent.replace("HALF", r"\ud83d\ude00\\ud83d").encode()).ignored


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_chat_takes_texts_by_every_name_and_as_strings(kind):
    messages = [{"role": role, "content": [{"type": kind, "text": "a"}, "b"]} for role in ("system", "user", "tool")]
    call = OpenAIChat().parse(json.dumps({"model": "m", "messages": messages}).encode())
    assert [message["content"] for message in call.messages] == ["ab", "ab", "ab"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "redacted_thinking", "data": "x"},
    ],
)
def test_reasoning_sent_back_as_a_part_is_no_content(part):
    messages = [
        {"role": "assistant", "content": [part, {"type": "text", "text": "y"}]},
        {"role": "user", "content": "a"},
    ]
    call = OpenAIChat().parse(json.dumps({"model": "m", "messages": messages}).encode())
    reasoning = {} if part["type"] == "redacted_thinking" else {"reasoning_content": "hm"}
    assert call.messages[0] == {"role": "assistant", "content": "y", **reasoning}
