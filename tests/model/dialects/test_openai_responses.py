import json

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent

from dialect_data import CALL, RESPONSES, answer, read_events
from rollout_backend.model.dialects.openai_responses import OpenAIResponses
from rollout_backend.model.model_call import ApiError, Delta

DIALECT = OpenAIResponses()
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}
USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def parse(**more):
    return DIALECT.parse(json.dumps({"model": "m", "input": "a", **more}).encode())


def messages(*items) -> list:
    return list(parse(input=list(items)).messages)


def assistant(*parts) -> dict:
    return {"type": "message", "role": "assistant", "content": list(parts)}


def said(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": []}


def call(id: str, arguments: str = "{}") -> dict:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": arguments}


def output(id: str, output) -> dict:
    return {"type": "function_call_output", "call_id": id, "output": output}


def reasoning(*texts: str) -> dict:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def shown(detail: str) -> dict:
    return {"role": "user", "content": [{"type": "input_image", "detail": detail}]}


def body(message: dict, *how, **request) -> dict:
    return DIALECT.body(parse(**request), answer(message, *how))


PATCH = "*** Begin\n  x = 1\n*** End\n"
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches."}
SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL, {**CUSTOM, "name": "c"}]}


def calling(name: str, arguments: object) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


# --- requests ---------------------------------------------------------------------------------------------


def test_a_conversation_is_converted_to_chat_messages():
    history = parse(
        instructions="be kind",
        input=[
            {"role": "developer", "content": "and brief"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            reasoning("h", "m"),
            {**assistant(said("let me "), said("look")), "id": "msg_1", "status": "completed"},
            {**call("c1", '{"x": 1}'), "id": "fc_1", "status": "completed"},
            call("c2"),
            output("c2", "two"),
            output("c1", [{"type": "input_text", "text": "one"}]),
            {"role": "user", "content": "c"},
        ],
        tools=[TOOL],
    )
    assert history.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "and brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "let me look",
            "reasoning_content": "hm",
            "tool_calls": [CALL, {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "user", "content": "c"},
    ]
    function = {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}
    assert history.tools == [{"type": "function", "function": function}]


def test_consecutive_replies_stay_separate_and_text_after_a_call_belongs_to_its_reply():
    easy = [{"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert messages(USER, *easy)[1:] == easy
    items = assistant(said("b")), call("c1", '{"x": 1}'), assistant(said("c")), output("c1", "r")
    assert messages(USER, *items)[1] == {"role": "assistant", "content": "bc", "tool_calls": [CALL]}


@pytest.mark.parametrize("hidden", [{"content": None}, {"summary": [{"type": "summary_text", "text": "s"}]}, {}])
def test_only_the_text_of_reasoning_is_kept(hidden):
    items = {"type": "reasoning", "id": "r", "encrypted_content": "x", **hidden}, assistant(said("b"))
    assert messages(USER, *items)[1] == {"role": "assistant", "content": "b"}


def test_sampling_and_limits():
    got = parse(max_output_tokens=9, temperature=0.5, top_p=0.9, parallel_tool_calls=False, stream=True, stop="x")
    assert (got.max_new_tokens, got.stream, got.parallel_tool_calls, got.stop) == (9, True, False, ("x",))
    assert got.sampling == {"temperature": 0.5, "top_p": 0.9}
    assert parse().parallel_tool_calls


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("auto", ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "name": "f"}, ("required", "f")),
        ({"type": "custom", "name": "patch"}, ("required", "patch")),
        ({"type": "function", "name": "f", "namespace": "crm"}, ("required", "crm__f")),
    ],
)
def test_tool_choice(choice, wanted):
    space = {"type": "namespace", "name": "crm", "description": "", "tools": [TOOL]}
    got = parse(tools=[TOOL, {"type": "custom", "name": "patch"}, space], tool_choice=choice)
    assert (got.tool_choice, got.tool_name) == wanted
    assert DIALECT.body(got, answer({"role": "assistant", "content": ""}))["tool_choice"] == choice


def test_custom_tools_and_namespaces_are_offered_as_functions():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    got = parse(tools=[{"type": "web_search"}, {**CUSTOM, "format": grammar}, SPACE, {"type": "local_shell"}])
    functions = {tool["function"]["name"]: tool["function"] for tool in got.tools}
    assert functions["patch"]["description"] == "Patches.\n\nThe input follows this lark grammar:\nstart: /a/"
    assert functions["patch"]["parameters"]["required"] == ["input"]
    assert functions["crm__f"]["parameters"] == PARAMETERS
    assert functions["crm__c"]["description"] == "Customers.\n\nPatches."
    assert (len(functions), got.ignored) == (3, {"web_search", "local_shell"})


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("patch", {"input": PATCH}, {"type": "custom_tool_call", "name": "patch", "input": PATCH}),
        ("patch", {"input": 1}, {"type": "function_call", "name": "patch", "arguments": '{"input": 1}'}),
        ("f", {"input": PATCH}, {"type": "function_call", "name": "f"}),
        ("crm__f", {"x": 1}, {"type": "function_call", "name": "f", "namespace": "crm", "arguments": '{"x": 1}'}),
        ("crm__c", {"input": "a"}, {"type": "custom_tool_call", "name": "c", "namespace": "crm", "input": "a"}),
    ],
)
def test_a_call_comes_back_as_its_tool_was_declared_and_is_read_again(name, arguments, item):
    message, declared = calling(name, arguments), [TOOL, CUSTOM, SPACE]
    (given,) = body(message, tools=declared)["output"]
    assert given.items() >= item.items()
    kind = "custom_tool_call_output" if item["type"].startswith("custom") else "function_call_output"
    asked = parse(input=[USER, given, {"type": kind, "call_id": "c1", "output": "done"}], tools=declared)
    assert asked.messages == [USER, message, {"role": "tool", "content": "done", "tool_call_id": "c1"}]
    delta = Delta("tool_call", tool_call=message["tool_calls"][0])
    sent = streamed([delta], lambda events: events.end(answer(message)), declared)
    assert sent[-1]["response"]["output"][0].items() >= item.items()


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, SCHEMA),
    ],
)
def test_text_formats(wanted, schema):
    got = parse(text={"format": wanted, "verbosity": "low"})
    assert got.json_schema == schema
    assert DIALECT.body(got, answer({"role": "assistant", "content": ""}))["text"]["format"] == wanted


@pytest.mark.parametrize(
    ("fault", "param", "says"),
    [
        ({"input": []}, "input", "nothing to reply to"),
        ({"tools": [{"type": ["function"]}]}, "tools.0", "type is missing"),
        ({"tools": [{"type": "browser"}]}, "tools.0", "type 'browser' is not supported here"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function.name", "required"),
        ({"tools": [{**SPACE, "description": "d" * 2**17, "tools": [TOOL] * 50}]}, "tools", "shorten them"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name", "is missing"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice.name", "name one of f"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "send only those tools"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input.0", "send the item itself"),
        ({"input": ["a"]}, "input.0", "type is missing"),
        ({"input": [shown("auto")]}, "input.0.message.content.0", "text only"),
        ({"input": [shown("low")]}, "input.0.message.content.0.input_image.detail", "shown in full"),
        (
            {"input": [output("c", [{"type": "input_file"}])]},
            "input.0.function_call_output.output.0",
            "not supported",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is missing"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"metadata": {"a": 1e999}}, None, "not JSON"),
    ],
)
def test_an_unsupported_field_is_refused(fault, param, says):
    with pytest.raises(ApiError) as error:
        parse(**fault)
    assert error.value.status == 400
    assert says in error.value.message
    if param:
        assert error.value.param == param


# --- answers ----------------------------------------------------------------------------------------------


def test_a_body():
    message = {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [CALL]}
    got = body(message, "tool_calls", instructions="i", tools=[TOOL], metadata={"k": "v"}, max_output_tokens=9)
    assert (got["id"], got["object"], got["created_at"], got["status"]) == ("resp_ab", "response", 1, "completed")
    assert got["output"] == [
        {
            "id": "rs_ab00",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {
            "id": "msg_ab01",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}],
        },
        {**call("c1", '{"x": 1}'), "id": "fc_ab02", "status": "completed"},
    ]
    assert (got["instructions"], got["metadata"], got["max_output_tokens"]) == ("i", {"k": "v"}, 9)
    assert (got["tools"], got["store"], got["error"]) == ([TOOL], False, None)
    assert got["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


DELTAS = [
    Delta("reasoning", "a"),
    Delta("reasoning", ""),
    Delta("text", "b"),
    Delta("text", "\u2028"),
    Delta("tool_call", tool_call=CALL),
    Delta("text", "c"),
]
EVENTS = pydantic.TypeAdapter(ResponseStreamEvent)


def streamed(deltas, last, tools=(TOOL,)) -> list[dict]:
    events = DIALECT.stream(parse(tools=list(tools)), "ab", 1, "m")
    stream = b"".join(events.start(11))
    for delta in deltas:
        stream += events.keepalive() + b"".join(events.delta(delta))
    stream += b"".join(last(events))
    assert stream.isascii()  # some clients end a line at U+2028
    sent = read_events(stream)
    assert [name for name, _ in sent] == [data["type"] for _, data in sent]
    assert [data["sequence_number"] for _, data in sent] == list(range(len(sent)))
    for _, data in sent:
        EVENTS.validate_python(data)
    return [data for _, data in sent]


def test_a_stream_has_all_kinds_of_events():
    message = {"role": "assistant", "content": "b\u2028c"}
    sent = streamed(DELTAS, lambda events: events.end(answer(message, "tool_calls")))
    text = ["content_part.added", *["output_text.delta"] * 2, "output_text.done", "content_part.done"]
    assert [data["type"].removeprefix("response.") for data in sent] == [
        *["created", "in_progress"],
        *["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"],
        *["content_part.done", "output_item.done", "output_item.added", *text, "output_item.done"],
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"],
        *["output_item.added", *text[1:], "output_item.done"][:1],
        *["content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"],
        "completed",
    ]
    items = sent[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "message"]
    assert items == [data["item"] for data in sent if data["type"] == "response.output_item.done"]
    assert [item["id"] for item in items] == [
        data["item"]["id"] for data in sent if data["type"] == "response.output_item.added"
    ]
    assert {data["item"]["status"] for data in sent if data["type"] == "response.output_item.added"} == {
        "in_progress"
    }


def test_a_failed_stream_ends_with_the_error_and_the_finished_items():
    sent = streamed(DELTAS, lambda events: events.failed(ApiError(503, "gone")))
    failed = sent[-1]["response"]
    assert (sent[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert failed["error"] == {"code": "server_error", "message": "gone"}
    assert [item["type"] for item in failed["output"]] == ["reasoning", "message", "function_call"]


def test_a_stream_that_fails_before_its_start_has_all_opening_events():
    events = DIALECT.stream(parse(), "ab", 1, "m")
    sent = read_events(b"".join(events.failed(ApiError(429, "busy"))))
    assert [name for name, _ in sent] == ["response.created", "response.in_progress", "response.failed"]
    assert sent[-1][1]["response"]["error"]["code"] == "rate_limit_exceeded"


# --- properties -------------------------------------------------------------------------------------------


@given(RESPONSES)
def test_an_answer_sent_back_equals_the_sampled_message(message):
    items = json.loads(json.dumps(body(message)))["output"]
    history = messages(USER, *items, USER)
    assert history == [USER, message, USER]


@given(RESPONSES, st.integers(1, 5))
def test_a_stream_ends_in_the_body(message, size):
    pieces = [
        Delta(kind, message[field][i : i + size])
        for kind, field in (("reasoning", "reasoning_content"), ("text", "content"))
        for i in range(0, len(message.get(field, "")), size)
    ] + [Delta("tool_call", tool_call=call) for call in message.get("tool_calls", ())]
    sent = streamed(pieces, lambda events: events.end(answer(message)))
    assert sent[-1]["response"] == body(message, tools=[TOOL])
    ids = [item["id"] for item in sent[-1]["response"]["output"]]
    for data in sent[2:-1]:
        assert ids[data["output_index"]] == (data.get("item_id") or data["item"]["id"])
    said = {
        "reasoning_text": message.get("reasoning_content", ""),
        "output_text": message["content"],
        "function_call_arguments": "".join(c["function"]["arguments"] for c in message.get("tool_calls", ())),
    }
    for kind, text in said.items():
        of_kind = [data for data in sent if data["type"].startswith(f"response.{kind}.")]
        assert "".join(data.get("delta", "") for data in of_kind) == text
        assert "".join(data.get("text", data.get("arguments", "")) for data in of_kind) == text
