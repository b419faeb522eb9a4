"""The dialect of OpenAI's chat completions (`POST /v1/chat/completions`). Pure.

What must always hold: what cannot be honoured and would change the agent's meaning is refused with a message that
says so (images for a model that has none, other tokens' logprobs, the functions of old); unknown fields are passed
over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rollout_backend.gateway.call import Answer, Choice, Delta, EventStream, Message, ModelCall
from rollout_backend.gateway.dialects import wire
from rollout_backend.gateway.dialects.images import ImageReader
from rollout_backend.gateway.dialects.wire import refused
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.images import Image, ImageLimits, content_of

MAX_CHOICES = 16
_TEXT_ONLY = "parts of type 'image_url' are not supported, only text is"
_WISHES = (
    *("temperature", "top_p", "top_k", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias"),
)
_UNSUPPORTED = {
    "functions": "use tools instead of functions",
    "function_call": "use tool_choice instead of function_call",
    "audio": "this model has no audio",
    "modalities": "this model speaks text only",
}


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _ImageUrl(_Body):
    url: str


class _Part(_Body):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | None = None


class _Function(_Body):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class _ToolCall(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def _is_tool(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError("only tools of type function are supported")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("function.name must be a text")
    return tool


_Tool = Annotated[dict[str, JsonValue], AfterValidator(_is_tool)]  # as it came: templates print it


class _ToolChoiceFunction(_Body):
    name: str = Field(min_length=1)


class _ToolChoice(_Body):
    type: Literal["function"]
    function: _ToolChoiceFunction


class _JsonSchema(_Body):
    json_schema: dict[str, JsonValue] | None = Field(default=None, alias="schema")


class _ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(_Body):
    include_usage: bool | None = None


class _Request(_Body):
    """Values are those of OpenAI's reference, and `top_k` as an extension."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63 - MAX_CHOICES)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: (
        str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=wire.MAX_STOP_STRINGS)] | None
    ) = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    frequency_penalty: JsonValue = None
    presence_penalty: JsonValue = None
    repetition_penalty: JsonValue = None
    min_p: JsonValue = None
    logit_bias: JsonValue = None
    functions: JsonValue = None
    function_call: JsonValue = None
    audio: JsonValue = None
    modalities: JsonValue = None


class OpenAIChat:
    """`images` is None where the model takes none."""

    name = "openai_chat"

    def __init__(self, images: ImageLimits | None = None) -> None:
        self._images = images

    def parse(self, body: bytes) -> ModelCall:
        request = _read(body)
        _refuse_unsupported(request)
        wishes = {name: getattr(request, name) for name in _WISHES}
        choice = request.tool_choice or "auto"
        images = ImageReader(self._images, _TEXT_ONLY)
        call = ModelCall(
            model=request.model,
            messages=[_plain(message, f"messages.{i}", images) for i, message in enumerate(request.messages)],
            images=images.found,
            tools=request.tools or None,
            tool_choice=choice if isinstance(choice, str) else "required",
            tool_name=choice.function.name if isinstance(choice, _ToolChoice) else None,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            json_schema=_schema(request.response_format),
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            stop=_stop_strings(request.stop),
            n=request.n or 1,
            logprobs=bool(request.logprobs),
            stream=bool(request.stream),
            # Of some it counts only that they were given: they are never obeyed.
            wishes={
                name: value if isinstance(value, (int, float)) else bool(value)
                for name, value in wishes.items()
                if value is not None
            },
            own=bool(request.stream_options and request.stream_options.include_usage),
        )
        if call.tool_choice == "required":
            wire.check_forced(call.tool_name, call.tools)
        return call

    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"refusal": None, **choice.message},
                "logprobs": _logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(answer.choices)
        ]
        head = _head("chat.completion", answer.id, answer.created, answer.model)
        return {**head, "choices": choices, "usage": _usage(answer)}

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream:
        return _Events(call, _head("chat.completion.chunk", answer_id, created, model))

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


# --- the request ------------------------------------------------------------------------------------------


def _read(body: bytes) -> _Request:
    try:
        return _Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise refused(where, first["msg"].removeprefix("Value error, ")) from None


def _refuse_unsupported(request: _Request) -> None:
    if request.top_logprobs:
        raise refused("top_logprobs", "only the sampled tokens' logprobs can be had")
    for name, advice in _UNSUPPORTED.items():
        if getattr(request, name) not in (None, [], ["text"], "none"):
            raise refused(name, advice)


def _schema(wanted: _ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise refused("response_format.json_schema.schema", "is missing")
    return wanted.json_schema.json_schema


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,) if stop else ()
    return tuple(stop or ())


def _plain(message: _Message, where: str, images: ImageReader) -> Message:
    plain: Message = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, where, images),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise refused(f"{where}.tool_call_id", "is missing")
        plain["tool_call_id"] = message.tool_call_id
    if message.role == "assistant":
        if message.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
    elif message.content is None:
        raise refused(f"{where}.content", "is missing")
    return plain


def _content(message: _Message, where: str, images: ImageReader) -> str | list[dict[str, Any]]:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    pieces: list[str | Image] = []
    for i, part in enumerate(message.content):
        at = f"{where}.content.{i}"
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if part.type == "image_url" and part.image_url is not None:
            image = images.url(part.image_url.url, at)
            if message.role not in ("user", "tool"):
                raise refused(at, f"a {message.role} message cannot hold an image")
            pieces.append(image)
        elif text is not None:
            pieces.append(text)
        else:
            raise refused(at, f"parts of type {part.type!r} are not supported, only text is")
    return content_of(pieces)


# --- the answer -------------------------------------------------------------------------------------------


def _head(kind: str, answer_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": created, "model": model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    return None if choice.logprobs is None else {"content": list(choice.logprobs), "refusal": None}


class _Events:
    def __init__(self, call: ModelCall, head: Mapping[str, Any]) -> None:
        self._include_usage: bool = call.own
        self._n = call.n
        self._head = head
        self._calls = [0] * call.n  # tool calls told so far, by choice

    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        for i in range(self._n):
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.kind == "tool_call":
            assert delta.tool_call is not None
            index = self._calls[delta.choice]
            self._calls[delta.choice] += 1
            yield self._chunk(delta.choice, {"tool_calls": [{"index": index, **delta.tool_call}]})
        elif delta.text:
            field = "reasoning_content" if delta.kind == "reasoning" else "content"
            yield self._chunk(delta.choice, {field: delta.text})

    def end(self, answer: Answer) -> Iterator[bytes]:
        for i, choice in enumerate(answer.choices):
            yield self._chunk(i, {}, finish_reason=choice.finish_reason, logprobs=_logprobs(choice))
        if self._include_usage:
            yield _event({**self._head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield _event(OpenAIChat().error_body(error))

    def keepalive(self) -> bytes:
        return b": sampling\n\n"

    def _chunk(self, index: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return _event({**self._head, "choices": [choice]})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
