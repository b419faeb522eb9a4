"""Anthropic's and OpenAI's clients read what the dialects write: bodies, streams and errors."""

import importlib
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from hypothesis import given
from openai.types.responses import Response as OpenAIResponse

from builders import assistant, user
from dialect_data import ANTHROPIC, FULL, PROMPT_TOKENS, answer
from rollout_backend.model.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.model.dialects.base import Dialect
from rollout_backend.model.dialects.openai_responses import OpenAIResponses
from rollout_backend.model.model_call import ApiError, Delta, ModelCall, whole_deltas


class Sdk:
    """A dialect that answers its SDK's `client` with a script, in the same process."""

    def __init__(self, client: type, dialect: Dialect) -> None:
        self.dialect = dialect
        self.calls: list[ModelCall] = []
        self.error: ApiError | None = None  # in a stream, after the deltas
        sdk = importlib.import_module(client.__module__.partition(".")[0])
        httpx = importlib.import_module(sdk.DefaultHttpxClient.__base__.__module__)  # newer: httpx2
        self._response = httpx.Response
        http = httpx.Client(transport=httpx.MockTransport(self._respond))
        self.client = client(api_key="k", max_retries=0, http_client=http)

    def reply(self, message: dict, *how) -> None:
        """Set the reply. A stream has each of its texts in two pieces."""
        self.answer = answer(message, *how)
        self.deltas = [half for delta in whole_deltas(message) for half in _halves(delta)]

    def _respond(self, request: Any) -> Any:
        call = self.dialect.parse(request.content)
        self.calls.append(call)
        if not call.stream:
            return self._response(200, json=self.dialect.body(call, self.answer))
        events = b"".join(self._events(call))
        return self._response(200, headers={"content-type": "text/event-stream"}, content=events)

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


def asked_of_anthropic() -> tuple[Sdk, dict[str, Any]]:
    return Sdk(anthropic.Anthropic, AnthropicMessages()), {"model": "m", "max_tokens": 5, "messages": [user("a")]}


def asked_of_openai() -> tuple[Sdk, dict[str, Any]]:
    return Sdk(openai.OpenAI, OpenAIResponses()), {"model": "m", "input": "a"}


@given(ANTHROPIC)
def test_any_stream_of_anthropics_adds_up_to_the_body(message):
    sdk, ask = asked_of_anthropic()
    sdk.reply(message)
    with sdk.client.messages.stream(**ask) as stream:
        assert stream.get_final_message().to_dict() == sdk.client.messages.create(**ask).to_dict()


def test_anthropics_client_raises_a_failure_in_a_stream():
    sdk, ask = asked_of_anthropic()
    sdk.reply(FULL)
    sdk.error = ApiError(503, "the engine is gone")
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine is gone") as error,
        sdk.client.messages.stream(**ask) as stream,
    ):
        stream.get_final_message()
    assert error.value.type == "overloaded_error"


def test_openais_client_accepts_bodies_and_sees_cuts_and_failures():
    sdk, ask = asked_of_openai()
    responses = sdk.client.responses
    sdk.reply(FULL, "tool_calls")
    OpenAIResponse.model_validate(responses.create(**ask).to_dict(), strict=True)
    sdk.reply(assistant("cut"), "length")
    assert responses.create(**ask).incomplete_details.reason == "max_output_tokens"
    *_, last = responses.create(**ask, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "cut")
    sdk.error = ApiError(503, "the engine is gone")
    *_, last = responses.create(**ask, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "the engine is gone")


def test_openais_client_parses_a_reply_with_a_schema():
    class Answered(pydantic.BaseModel):
        a: str

    sdk, ask = asked_of_openai()
    sdk.reply(assistant('{"a": "b"}', reasoning_content="hm"))
    ask["text_format"] = Answered
    assert sdk.client.responses.parse(**ask).output_parsed == Answered(a="b")
    with sdk.client.responses.stream(**ask) as stream:
        assert stream.get_final_response().output_parsed == Answered(a="b")
    assert {call.json_schema["properties"]["a"]["type"] for call in sdk.calls} == {"string"}
