import json

import pytest
from hypothesis import given

from dialect_data import ANTHROPIC, CALL, answer, read_events
from rollout_backend.model.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.model.model_call import ApiError, Delta

DIALECT = AnthropicMessages()
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
IN_A_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def parse(**more):
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **more}
    return DIALECT.parse(json.dumps(body).encode())


def refusal(**more) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(**more)
    assert error.value.status == 400
    return error.value


def messages(*history) -> list:
    return list(parse(messages=list(history)).messages)


def user(*content) -> dict:
    return {"role": "user", "content": list(content)}


def assistant(*content) -> dict:
    return {"role": "assistant", "content": list(content)}


def text(text: str) -> dict:
    return {"type": "text", "text": text}


def body(message: dict, *how) -> dict:
    return DIALECT.body(parse(), answer(message, *how))


# --- requests ---------------------------------------------------------------------------------------------


def test_a_conversation_is_converted_to_chat_messages():
    call = parse(
        system=[{**text("be "), **EPHEMERAL}, text("kind")],
        messages=[
            user(text("a"), {**text("b"), **EPHEMERAL}),
            assistant(
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("let me "),
                text("look"),
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": "ü"}, **EPHEMERAL},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ),
            user(
                text("and "),
                {"type": "tool_result", "tool_use_id": "c2", "content": "two", **EPHEMERAL},
                {"type": "tool_result", "tool_use_id": "c1", "content": [text("o"), text("ne")], "is_error": True},
                text("more"),
            ),
            {"role": "system", "content": "now in French"},
        ],
        tools=[{**TOOL, **EPHEMERAL, "type": "custom"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
    )
    assert call.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "let me look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü"}'}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "user", "content": "and more"},
        {"role": "system", "content": "now in French"},
    ]
    function = {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}
    assert call.tools == [{"type": "function", "function": function}]


def test_consecutive_assistant_messages_are_joined():
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    apart = messages(user(text("a")), assistant(text("b")), assistant(use), user(text("c")))
    assert apart == messages(user(text("a")), assistant(text("b"), use), user(text("c")))
    assert apart[1] == {"role": "assistant", "content": "b", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": [], "is_error": False}, ""),
        ({"is_error": True}, "Error"),
        ({"content": "no such file", "is_error": True}, "no such file"),
    ],
)
def test_the_content_of_a_tool_result(result, content):
    result = {"type": "tool_result", "tool_use_id": "c", **result}
    assert messages(user(result)) == [{"role": "tool", "content": content, "tool_call_id": "c"}]


def test_the_billing_header_is_removed_from_the_prompt():
    line = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"
    apart = parse(system=[text(line), text("be kind")])
    assert apart.messages[0]["content"] == "be kind"
    assert parse(system=f"{line}\nbe kind").messages == apart.messages
    assert parse(system=f"say {line}").messages[0]["content"] == f"say {line}"


def test_sampling_and_limits():
    call = parse(stop_sequences=["x", "y"], temperature=0.5, top_p=0.9, top_k=3, stream=True)
    assert (call.max_new_tokens, call.stop, call.stream) == (5, ("x", "y"), True)
    assert call.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
    assert parse().sampling == {}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "f"}, ("required", "f", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_tool_choice(choice, wanted):
    call = parse(tools=[TOOL], tool_choice=choice)
    assert (call.tool_choice, call.tool_name, call.parallel_tool_calls) == wanted


@pytest.mark.parametrize(
    ("fault", "param", "says"),
    [
        ({"max_tokens": -1}, "max_tokens", "greater"),
        ({"max_tokens": 0, "stream": True}, "max_tokens", "nothing to stream"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0.content.0.image", "takes text only"),
        ({"messages": [user(IN_A_RESULT)]}, "messages.0.content.0.tool_result.content.0.image", "takes text only"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages.0.content.0.document", "as text"),
        ({"messages": [user({"type": "server_tool_use"})]}, "messages.0.content.0", "'server_tool_use' is not supp"),
        ({"messages": [user({"no": "type"})]}, "messages.0.content.0", "type is missing"),
        ({"messages": [user({"type": "tool_use", "id": "i", "name": "f", "input": {}})]}, None, "cannot hold"),
        ({"messages": [assistant({"type": "tool_result", "tool_use_id": "i"})] * 2 + [user()]}, None, "cannot hold"),
        ({"messages": [user(), assistant(text("He said"))]}, "messages.1", "must end with a user message"),
        ({"system": [{"type": "image"}]}, "system.0", "takes text only"),
        ({"tools": [{"type": "custom_20250124", "name": "f"}]}, "tools.0", "'custom_20250124' is not supported here"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools", "has only tools that Anthropic trains its own models on"),
        (
            {"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}},
            "tool_choice",
            "there are no tools",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.custom.input_schema", "required"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name", "is missing"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name", "name one of f"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "17 stop strings, and at most 16"),
    ],
)
def test_an_unsupported_field_is_refused(fault, param, says):
    error = refusal(**fault)
    assert says in error.message
    if param:
        assert error.param == param


def test_counting_tokens_needs_no_limit_and_accepts_a_final_reply():
    counted = {"model": "m", "messages": [user(text("a")), assistant(text("b"))], "tools": [TOOL], "system": "s"}
    call = DIALECT.parse_count(json.dumps(counted).encode())
    assert [message["role"] for message in call.messages] == ["system", "user", "assistant"]
    assert (len(call.tools), call.max_new_tokens) == (1, None)
    assert DIALECT.count_body(9) == {"input_tokens": 9}


# --- answers ----------------------------------------------------------------------------------------------


def test_a_body():
    message = {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [CALL]}
    said = body(message, "tool_calls")
    assert said["id"] == "msg_ab"
    assert [block["type"] for block in said["content"]] == ["thinking", "text", "tool_use"]
    assert said["content"][0]["signature"]
    assert said["content"][2] == {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    assert (said["stop_reason"], said["stop_sequence"]) == ("tool_use", None)
    usage = said["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (7, 4, 7)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"INVALID_JSON": "x"}', '{"INVALID_JSON": "{}"}'],
)
def test_arguments_that_an_input_cannot_hold_survive_a_round_trip(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = body({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls")
    assert said["content"][0]["input"] == {"INVALID_JSON": arguments}
    assert messages(assistant(*said["content"]), user())[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (410, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status, kind):
    said = DIALECT.error_body(ApiError(status, "why"))
    assert said == {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": None}


def test_blocks_of_a_stream_do_not_overlap():
    events = DIALECT.stream(parse(), "ab", 1, "m")
    deltas = [
        Delta("reasoning", "a"),
        Delta("reasoning", ""),
        Delta("reasoning", "b"),
        Delta("text", "\u2028"),
        Delta("tool_call", tool_call=CALL),
        Delta("tool_call", tool_call={**CALL, "id": "c2"}),
        Delta("text", "d"),
    ]
    stream = b"".join(events.start(3))
    for delta in deltas:
        stream += b"".join(events.delta(delta))
    stream += b"".join(events.end(answer({"role": "assistant", "content": ""}, "tool_calls")))
    assert stream.isascii()  # some clients end a line at U+2028
    sent = [data for name, data in read_events(stream) if name == data["type"]]
    assert [data["type"] for data in sent] == [
        "message_start",
        *["content_block_start", *["content_block_delta"] * 3, "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    assert [data["index"] for data in sent if "index" in data] == [0] * 5 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert sent[4]["delta"]["type"] == "signature_delta"


# --- properties -------------------------------------------------------------------------------------------


def readable(arguments: str) -> object:
    try:
        return [json.loads(arguments)]
    except ValueError:
        return arguments


def compared(message: dict) -> dict:
    calls = message.get("tool_calls", [])
    return {
        **message,
        "tool_calls": [[c["id"], c["function"]["name"], readable(c["function"]["arguments"])] for c in calls],
    }


@given(ANTHROPIC)
def test_an_answer_sent_back_equals_the_sampled_message(message):
    said = json.loads(json.dumps(body(message)))
    history = messages(user(text("a")), {"role": said["role"], "content": said["content"]}, user(text("b")))
    assert compared(history[1]) == compared(message)
    assert len(history) == 3
