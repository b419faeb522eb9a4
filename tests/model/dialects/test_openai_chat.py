import json

import pytest

from builders import assistant, user
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.model_call import Answer, ApiError, Choice, Delta, ModelCall

CHAT = OpenAIChat()
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parse(**more) -> ModelCall:
    return CHAT.parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **more}).encode())


def shown(detail: str) -> dict:
    return {"type": "image_url", "image_url": {"url": "x", "detail": detail}}


def answer(*messages: dict, reason="stop") -> Answer:
    choices = tuple(Choice(message, reason, 3, logprobs=[{"token": "t"}]) for message in messages)
    return Answer("id", 1, "m", choices, prompt_tokens=10, cached_tokens=4)


def test_messages_are_normalised():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": None, "something": 1},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": None}]},
        {"role": "assistant", "content": "d", "reasoning_content": "r", "name": "n", "prefix": False},
        {"role": "assistant", "content": "e", "reasoning": "r", "tool_calls": [{**CALL, "type": None}]},
        *({"role": role, "content": None} for role in ("tool", "system")),
    ]
    assert parse(messages=messages).messages == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": "d", "reasoning_content": "r", "name": "n"},
        {"role": "assistant", "content": "e", "reasoning_content": "r", "tool_calls": [CALL]},
        *({"role": role, "content": ""} for role in ("tool", "system")),
    ]


def test_sampling_and_limits():
    call = parse(
        max_tokens=3,
        max_completion_tokens=4,
        stop="x",
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": False},
        temperature=0.5,
        top_k=3,
        min_p=0.1,
        logit_bias={"1": 2},
        reasoning={"effort": "low"},
        thinking={"type": "enabled"},
        parallel_tool_calls=False,
    )
    assert (call.max_new_tokens, call.stop, call.n, call.logprobs, call.stream) == (4, ("x",), 2, True, True)
    assert call.sampling == {
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "logit_bias": True,
        "reasoning": True,
        "thinking": True,
    }
    assert not call.parallel_tool_calls
    assert parse() == ModelCall("m", [{"role": "user", "content": "a"}], dialect_data=False)


def test_the_model_sees_no_other_fields_of_a_tool():
    function = {"strict": None, "name": "f", "defer_loading": True, "returns": "x"}
    call = parse(tools=[{"function": function, "cache_control": {"type": "ephemeral"}}])
    assert json.dumps(call.tools) == json.dumps([TOOL])
    assert call.ignored == {"cache_control", "defer_loading"}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "function": {"name": "f"}}, ("required", "f")),
    ],
)
def test_tool_choice(choice, wanted):
    call = parse(tools=[TOOL], tool_choice=choice)
    assert (call.tool_choice, call.tool_name) == wanted


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_response_format(asked, wanted):
    assert parse(response_format=asked).json_schema == wanted


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"messages": []}, "messages"),
        (
            {"messages": [assistant("It", prefix=True)]},
            "messages.0.prefix: this model cannot continue a prefilled reply",
        ),
        ({"messages": [assistant("It", partial=True)]}, "messages.0.partial: this model cannot continue a prefilled"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats: usage is sent once",
        ),
        ({"messages": [user([shown("auto")])]}, "messages.0.content.0: parts of type 'image_url' are not supported"),
        ({"messages": [user([shown("low")])]}, "messages.0.content.0.image_url.detail: images are shown in full"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"n": 17}, "n"),
        ({"seed": 2**63 - 1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
    ],
)
def test_a_refusal_names_the_field(more, where):
    with pytest.raises(ApiError) as refused:
        parse(**more)
    assert refused.value.status == 400
    assert str(refused.value).startswith(where)


def test_the_events_of_a_stream_name_their_choice():
    stream = CHAT.stream(parse(n=2, stream=True, stream_options={"include_usage": True}), "id", 1, "m")
    whole = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    events = [
        *stream.start(10),
        *stream.delta(Delta("reasoning", "hm", choice=1)),
        *stream.delta(Delta("text", "a\u2028")),
        *stream.delta(Delta("tool_call", tool_call=CALL, choice=1)),
        *stream.delta(Delta("tool_call", tool_call=CALL, choice=1)),
        *stream.end(answer({"role": "assistant", "content": "a"}, whole, reason="tool_calls")),
    ]
    assert events.pop() == b"data: [DONE]\n\n"
    assert all(event.count(b"\n") == 2 for event in events)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    sent = [(choice["index"], choice["delta"]) for chunk in chunks for choice in chunk["choices"]]
    assert sent == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"reasoning_content": "hm"}),
        (0, {"content": "a\u2028"}),
        (1, {"tool_calls": [{"index": 0, **CALL}]}),
        (1, {"tool_calls": [{"index": 1, **CALL}]}),
        (0, {}),
        (1, {}),
    ]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-2:] == ["tool_calls"] * 2
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
