"""Anthropic's and OpenAI's clients read what the dialects write: bodies, streams and errors."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import anthropic
import openai
import pydantic
import pytest
from openai.types.responses import Response as OpenAIResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from builders import assistant, user
from dialect_data import CALL, FULL, PROMPT_TOKENS, answer
from gateway_server import ServerThread
from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import Answer, Delta, ModelCall
from rollout_backend.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.dialects.openai_responses import OpenAIResponses


@dataclass
class Script:
    """What the server answers, and the calls that it got."""

    answer: Answer | None = None
    deltas: Sequence[Delta] = ()
    error: ApiError | None = None  # in a stream, after the deltas
    calls: list[ModelCall] = field(default_factory=list)

    def reply(self, message: dict, *how) -> None:
        """Set the reply. A stream has each of its texts in two pieces."""
        self.answer = answer(message, *how)
        self.deltas = [
            *_halves("reasoning", message.get("reasoning_content")),
            *_halves("text", message["content"]),
            *(Delta("tool_call", tool_call=call) for call in message.get("tool_calls", ())),
        ]


def _halves(kind, text: str | None) -> list[Delta]:
    middle = len(text or "") // 2
    return [Delta(kind, text[:middle]), Delta(kind, text[middle:])] if text else []


class Sdk(ServerThread):
    """A server of one dialect, which answers with its script, and how its SDK is used."""

    def __init__(self) -> None:
        self.script = Script()
        routes = [Route(self.path, self._answer, methods=["POST"])]
        routes.append(Route(f"{self.path}/count_tokens", self._count, methods=["POST"]))
        super().__init__(Starlette(routes=routes))

    async def _answer(self, request: Request) -> Response:
        call = self.dialect.parse(await request.body())
        self.script.calls.append(call)
        if call.stream:
            return StreamingResponse(self._events(call), media_type="text/event-stream")
        return JSONResponse(self.dialect.body(call, self.script.answer))

    async def _count(self, request: Request) -> Response:
        self.dialect.parse_count(await request.body())
        return JSONResponse(self.dialect.count_body(PROMPT_TOKENS))

    def _events(self, call: ModelCall) -> Iterator[bytes]:
        events = self.dialect.stream(call, "ab", 1, "m")
        yield events.keepalive()
        yield from events.start(PROMPT_TOKENS)
        for delta in self.script.deltas:
            yield from events.delta(delta)
            yield events.keepalive()
        yield from events.failed(self.script.error) if self.script.error else events.end(self.script.answer)


class AnthropicSdk(Sdk):
    dialect, path, module = AnthropicMessages(), "/v1/messages", anthropic
    ask = {  # noqa: RUF012
        "model": "m",
        "max_tokens": 5,
        "messages": [user("a")],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }

    def client(self):
        return anthropic.Anthropic(base_url=self.url, api_key="k", max_retries=0)

    def create(self, client, **more):
        return client.messages.create(**{**self.ask, **more})

    def stream(self, client):
        return client.messages.stream(**self.ask)

    def final(self, stream):
        return stream.get_final_message()

    def parts(self, message) -> tuple[str, str, list]:
        """Return the reasoning, the text, and the calls."""
        blocks = message.content
        thinking = "".join(block.thinking for block in blocks if block.type == "thinking")
        text = "".join(block.text for block in blocks if block.type == "text")
        return thinking, text, [(block.id, block.name, block.input) for block in blocks if block.type == "tool_use"]


class OpenAISdk(Sdk):
    dialect, path, module = OpenAIResponses(), "/v1/responses", openai
    ask = {  # noqa: RUF012
        "model": "m",
        "input": "a",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    }

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)

    def create(self, client, **more):
        return client.responses.parse(**{**self.ask, **more})  # with what the stream's helper adds to each item

    def stream(self, client):
        return client.responses.stream(**self.ask)

    def final(self, stream):
        return stream.get_final_response()

    def parts(self, response) -> tuple[str, str, list]:
        reasoning = "".join(item.content[0].text for item in response.output if item.type == "reasoning")
        calls = [item for item in response.output if item.type == "function_call"]
        return reasoning, response.output_text, [(c.call_id, c.name, json.loads(c.arguments)) for c in calls]


@pytest.fixture(scope="module", params=[AnthropicSdk, OpenAISdk])
def server(request):
    with request.param() as server:
        yield server


@pytest.fixture
def sdk(server):
    server.script = Script()
    return server


@pytest.fixture
def client(sdk):
    with sdk.client() as client:
        yield client


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
def test_the_client_reads_every_part_and_the_same_from_a_stream(sdk, client, reply):
    if sdk.module is openai and "length" in reply:
        pytest.skip("the helper for streams fails if the reply was cut")
    message = reply[0]
    sdk.script.reply(*reply)
    plain = sdk.create(client)
    with sdk.stream(client) as stream:
        assert sdk.final(stream).to_dict() == plain.to_dict()
    calls = [(call["id"], "f", {"x": 1}) for call in message.get("tool_calls", ())]
    assert sdk.parts(plain) == (message.get("reasoning_content", ""), message["content"] or "", calls)
    assert [call.stream for call in sdk.script.calls] == [False, True]


# --- Anthropic's client -----------------------------------------------------------------------------------


@pytest.fixture
def anthropic_sdk():
    with AnthropicSdk() as sdk:
        yield sdk


def test_anthropics_client_counts_and_raises_a_failure_in_a_stream(anthropic_sdk):
    sdk = anthropic_sdk
    with sdk.client() as client:
        assert client.messages.count_tokens(model="m", messages=sdk.ask["messages"]).input_tokens == PROMPT_TOKENS
        sdk.script.reply(FULL)
        sdk.script.error = ApiError(503, "the engine is gone")
        failing = pytest.raises(anthropic.APIStatusError, match="the engine is gone")
        with failing as error, sdk.stream(client) as stream:
            sdk.final(stream)
    assert error.value.type == "overloaded_error"


# --- OpenAI's client --------------------------------------------------------------------------------------


@pytest.fixture
def openai_sdk():
    with OpenAISdk() as sdk:
        yield sdk


def test_openais_client_accepts_bodies_and_sees_cuts_and_failures(openai_sdk):
    sdk, ask = openai_sdk, {"model": "m", "input": "a"}
    with sdk.client() as client:
        sdk.script.reply(FULL, "tool_calls")
        OpenAIResponse.model_validate(client.responses.create(**ask).to_dict(), strict=True)
        sdk.script.reply(assistant("cut"), "length")
        assert client.responses.create(**ask).incomplete_details.reason == "max_output_tokens"
        *_, last = client.responses.create(**ask, stream=True)
        assert (last.type, last.response.output_text) == ("response.incomplete", "cut")
        sdk.script.error = ApiError(503, "the engine is gone")
        *_, last = client.responses.create(**ask, stream=True)
        assert (last.type, last.response.error.message) == ("response.failed", "the engine is gone")


def test_openais_client_parses_a_reply_with_a_schema(openai_sdk):
    class Answered(pydantic.BaseModel):
        a: str

    sdk, ask = openai_sdk, {"model": "m", "input": "a", "text_format": Answered}
    sdk.script.reply(assistant('{"a": "b"}'))
    with sdk.client() as client:
        assert client.responses.parse(**ask).output_parsed == Answered(a="b")
        with client.responses.stream(**ask) as stream:
            assert stream.get_final_response().output_parsed == Answered(a="b")
    assert {call.json_schema["properties"]["a"]["type"] for call in sdk.script.calls} == {"string"}
