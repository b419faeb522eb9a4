import json

import pytest
from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from agent_wrapper.contract import Sampling
from rollout_backend.gateway.engine import Completion
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.openai_chat import ChatRequest, engine_params, read_reply

COMPLETION = Completion((1, 2), (-1.0, None), (), "stop", None, 0, 0.0)
GOOD = ParsedToolCall(raw="{}", name="f", arguments={"a": "ü"})
BAD = ParsedToolCall(raw='{"name": "f"', status=ToolCallParseStatus.UNCLOSED_BLOCK)
UNKNOWN = ParsedToolCall(raw="{}", name="g", arguments={}, status=ToolCallParseStatus.UNKNOWN_TOOL, id="own")


def request(**more) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **more}
    return ChatRequest.parse(json.dumps(body).encode())


def params(sampling=Sampling(), may_set=(), prompt=10, context=100, **more) -> dict:  # noqa: B008
    return engine_params(request(**more), sampling, may_set, prompt, context, [2]).params


def test_messages_become_plain():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": None, "something": 1},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": []},
    ]
    assert request(messages=messages).plain_messages() == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]


def test_tools_stay_as_they_came():
    tools = [{"function": {"parameters": {"b": 1, "a": None}, "name": "f"}, "type": "function", "x": [1.5]}]
    assert json.dumps(request(tools=tools).tools) == json.dumps(tools)


@pytest.mark.parametrize(
    ("asked", "trainers", "prompt", "wanted"),
    [(None, None, 10, 90), (7, None, 10, 7), (7, 5, 10, 5), (None, 50, 60, 40), (500, 500, 99, 1)],
)
def test_a_reply_is_as_long_as_everybody_allows(asked, trainers, prompt, wanted):
    assert params(Sampling(max_tokens=trainers), prompt=prompt, max_tokens=asked)["max_new_tokens"] == wanted


def test_no_room_for_a_reply_is_refused():
    with pytest.raises(ApiError) as error:
        params(prompt=100)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")


def test_what_the_trainer_left_open_is_not_sent():
    assert params() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 90,
        "stop_token_ids": [2],
    }


def test_a_reply_carries_what_could_be_read_and_what_could_not():
    parsed = ParsedResponse(content="text", reasoning_content="why", tool_calls=[GOOD, BAD, UNKNOWN])
    reply = read_reply(parsed, COMPLETION, tools_offered=True, text="all of it")
    assert reply.message["content"] == 'text\n{"name": "f"'
    assert reply.message["reasoning_content"] == "why"
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["f", "g"]
    assert reply.message["tool_calls"][0]["function"]["arguments"] == '{"a": "ü"}'
    assert reply.message["tool_calls"][1]["id"] == "own"
    assert (reply.finish_reason, reply.malformed_tool_calls) == ("tool_calls", 1)


def test_a_reply_that_is_only_a_broken_call_is_not_empty():
    reply = read_reply(ParsedResponse(content="", tool_calls=[BAD]), COMPLETION, tools_offered=True, text="")
    assert reply.message == {"role": "assistant", "content": '{"name": "f"'}
    assert reply.finish_reason == "stop"


def test_without_tools_the_text_is_the_content():
    reply = read_reply(ParsedResponse(content="", tool_calls=[GOOD]), COMPLETION, tools_offered=False, text="<f>")
    assert reply.message == {"role": "assistant", "content": "<f>"}
