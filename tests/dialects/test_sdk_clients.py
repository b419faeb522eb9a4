"""Anthropic's and OpenAI's clients read what the dialects write: bodies, streams and errors."""

import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from hypothesis import given
from openai.types.responses import Response as OpenAIResponse

from builders import assistant, user
from dialect_data import ANTHROPIC, CALL, FULL, PROMPT_TOKENS, answer
from rollout_backend.core.model_call import ApiError, Delta, ModelCall, whole_deltas
from rollout_backend.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.dialects.base import Dialect
from rollout_backend.dialects.openai_responses import OpenAIResponses


class Sdk:
    """A dialect that answers its SDK's client with a script, in the same process."""

    sdk: ModuleType
    dialect: Dialect
    ask: dict[str, Any]
    error: ApiError | None = None  # in a stream, after the deltas

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        httpx = importlib.import_module(self.sdk.DefaultHttpxClient.__base__.__module__)  # newer: httpx2
        self.response = httpx.Response
        self.http = httpx.Client(transport=httpx.MockTransport(self._respond))

    def reply(self, message: dict, *how) -> None:
        """Set the reply. A stream has each of its texts in two pieces."""
        self.answer = answer(message, *how)
        self.deltas = [half for delta in whole_deltas(message) for half in _halves(delta)]

    def _respond(self, request: Any) -> Any:
        if request.url.path.endswith("/count_tokens"):
            self.dialect.parse_count(request.content)
            return self.response(200, json=self.dialect.count_body(PROMPT_TOKENS))
        call = self.dialect.parse(request.content)
        self.calls.append(call)
        if not call.stream:
            return self.response(200, json=self.dialect.body(call, self.answer))
        events = b"".join(self._events(call))
        return self.response(200, headers={"content-type": "text/event-stream"}, content=events)

    def _events(self, call: ModelCall) -> Iterator[bytes]:
        events = self.dialect.stream(call, "ab", 1, "m")
        yield events.keepalive()
        yield from events.start(PROMPT_TOKENS)
        for delta in self.deltas:
            yield from events.delta(delta)
            yield events.keepalive()
        yield from events.failed(self.error) if self.error else events.end(self.answer)


def _halves(delta: Delta) -> list[Delta]:
    middle = len(delta.text) // 2
    pieces = delta.text[:middle], delta.text[middle:]
    return [Delta(delta.kind, text) for text in pieces] if delta.text else [delta]


class AnthropicSdk(Sdk):
    sdk = anthropic
    dialect = AnthropicMessages()
    ask = {  # noqa: RUF012
        "model": "m",
        "max_tokens": 5,
        "messages": [user("a")],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }

    def __init__(self) -> None:
        super().__init__()
        self.messages = anthropic.Anthropic(api_key="k", max_retries=0, http_client=self.http).messages

    def create(self):
        return self.messages.create(**self.ask)

    def streamed(self):
        with self.messages.stream(**self.ask) as stream:
            return stream.get_final_message()

    def parts(self, message) -> tuple[str, str, list]:
        """Return the reasoning, the text, and the calls."""
        blocks = message.content
        thinking = "".join(block.thinking for block in blocks if block.type == "thinking")
        text = "".join(block.text for block in blocks if block.type == "text")
        return thinking, text, [(block.id, block.name, block.input) for block in blocks if block.type == "tool_use"]


class OpenAISdk(Sdk):
    sdk = openai
    dialect = OpenAIResponses()
    ask = {  # noqa: RUF012
        "model": "m",
        "input": "a",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    }

    def __init__(self) -> None:
        super().__init__()
        self.responses = openai.OpenAI(api_key="k", max_retries=0, http_client=self.http).responses

    def create(self):
        return self.responses.parse(**self.ask)  # with what the stream's helper adds to each item

    def streamed(self):
        with self.responses.stream(**self.ask) as stream:
            return stream.get_final_response()

    def parts(self, response) -> tuple[str, str, list]:
        reasoning = "".join(item.content[0].text for item in response.output if item.type == "reasoning")
        calls = [item for item in response.output if item.type == "function_call"]
        return reasoning, response.output_text, [(c.call_id, c.name, json.loads(c.arguments)) for c in calls]


@given(ANTHROPIC)
def test_any_stream_of_anthropics_adds_up_to_the_body(message):
    sdk = AnthropicSdk()
    sdk.reply(message)
    assert sdk.streamed().to_dict() == sdk.create().to_dict()


@pytest.mark.parametrize(
    "reply",
    [
        (FULL, "tool_calls"),
        (assistant(None, tool_calls=[CALL]), "tool_calls"),
        (assistant("short"), "stop", "END"),
        (assistant("cut"), "length"),
        (assistant(""), "stop"),
        (assistant("", reasoning_content="hm"), "stop"),
    ],
)
@pytest.mark.parametrize("api", [AnthropicSdk, OpenAISdk])
def test_the_client_reads_every_part_and_the_same_from_a_stream(api, reply):
    if api is OpenAISdk and "length" in reply:
        pytest.skip("the helper for streams fails if the reply was cut")
    sdk, message = api(), reply[0]
    sdk.reply(*reply)
    plain = sdk.create()
    assert sdk.streamed().to_dict() == plain.to_dict()
    calls = [(call["id"], "f", {"x": 1}) for call in message.get("tool_calls", ())]
    assert sdk.parts(plain) == (message.get("reasoning_content", ""), message["content"] or "", calls)
    assert [call.stream for call in sdk.calls] == [False, True]


def test_anthropics_client_counts_and_raises_a_failure_in_a_stream():
    sdk = AnthropicSdk()
    assert sdk.messages.count_tokens(model="m", messages=sdk.ask["messages"]).input_tokens == PROMPT_TOKENS
    sdk.reply(FULL)
    sdk.error = ApiError(503, "the engine is gone")
    with pytest.raises(anthropic.APIStatusError, match="the engine is gone") as error:
        sdk.streamed()
    assert error.value.type == "overloaded_error"


def test_openais_client_accepts_bodies_and_sees_cuts_and_failures():
    sdk, ask = OpenAISdk(), {"model": "m", "input": "a"}
    sdk.reply(FULL, "tool_calls")
    OpenAIResponse.model_validate(sdk.responses.create(**ask).to_dict(), strict=True)
    sdk.reply(assistant("cut"), "length")
    assert sdk.responses.create(**ask).incomplete_details.reason == "max_output_tokens"
    *_, last = sdk.responses.create(**ask, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "cut")
    sdk.error = ApiError(503, "the engine is gone")
    *_, last = sdk.responses.create(**ask, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "the engine is gone")


def test_openais_client_parses_a_reply_with_a_schema():
    class Answered(pydantic.BaseModel):
        a: str

    sdk, ask = OpenAISdk(), {"model": "m", "input": "a", "text_format": Answered}
    sdk.reply(assistant('{"a": "b"}'))
    assert sdk.responses.parse(**ask).output_parsed == Answered(a="b")
    with sdk.responses.stream(**ask) as stream:
        assert stream.get_final_response().output_parsed == Answered(a="b")
    assert {call.json_schema["properties"]["a"]["type"] for call in sdk.calls} == {"string"}
