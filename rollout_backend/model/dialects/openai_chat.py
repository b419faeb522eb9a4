"""Speak OpenAI's Chat Completions API: `POST /v1/chat/completions`. Pure.

Invariant: unsupported input that would change the call's meaning is refused with a message that names it: images for
a text-only model, logprobs of other tokens, the deprecated functions, unknown fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from rollout_backend.model.dialects import base
from rollout_backend.model.dialects.base import Body, Dialect, EventStream, ImageReader, refuse, refused
from rollout_backend.model.images import Image
from rollout_backend.model.model_call import Answer, ApiError, Delta, Message, ModelCall

_NO_PREFILL = "this model cannot continue a prefilled reply; leave it out"
_TEXT_ONLY = "parts of type 'image_url' are not supported, only text is"
_SHOWN = frozenset({"name", "description", "parameters", "strict"})
_HARMLESS = frozenset({"prediction"})


class _ImageUrl(Body):
    url: str
    detail: Annotated[JsonValue, refuse("images are shown in full; leave it out", "auto", "high", "original")] = None


class _Part(Body):
    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: JsonValue = None
    reasoning: str | None = None
    summary: JsonValue = None
    image_url: _ImageUrl | None = None


class _Function(Body):
    name: str = Field(min_length=1)
    arguments: str | dict[str, JsonValue] | None = None


class _ToolCall(Body):
    id: str | None = None
    type: Annotated[Literal["function"], BeforeValidator(lambda kind: kind or "function")] = "function"
    function: _Function


_AnyPart = Annotated[
    _Part, BeforeValidator(lambda part: {"type": "text", "text": part} if isinstance(part, str) else part)
]
# Parts that vLLM's endpoint reads as text, with the fields of the text. Clients send the parts of a reply back.
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), ("text",)),
    "refusal": ("refusal",),
    **dict.fromkeys(("thinking", "reasoning"), ("thinking", "reasoning", "text", "summary")),
    "redacted_thinking": (),
}
_REASONING = frozenset({"thinking", "reasoning", "redacted_thinking"})


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[base.Items[_AnyPart] | None, BeforeValidator(base.as_texts)] = None
    refusal: str | None = None
    audio: Annotated[JsonValue, refuse("this model has no audio; send what was said as content")] = None
    function_call: Annotated[JsonValue, refuse("functions are tools here; send the call as tool_calls")] = None
    name: str | None = None
    tool_calls: base.Items[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Newer engines use this name instead of `reasoning_content`.
    reasoning: str | None = None
    prefix: Annotated[JsonValue, refuse(_NO_PREFILL, False)] = None
    partial: Annotated[JsonValue, refuse(_NO_PREFILL, False)] = None


def _as_shown(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the fields that engines give to the template, which prints all of them, in the client's order."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError("only tools of type function are supported")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("function.name must be a string")
    left_out = function.keys() - _SHOWN | ({"strict"} if function.get("strict") is None else set())
    return {"type": "function", "function": {k: v for k, v in function.items() if k not in left_out}}


_Tool = Annotated[dict[str, JsonValue], AfterValidator(_as_shown)]


class _ToolChoice(Body):
    type: Literal["auto", "none", "required", "function"]
    function: _Function | None = None


class _JsonSchema(Body):
    json_schema: dict[str, JsonValue] | None = Field(default=None, alias="schema")


class _ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[JsonValue, refuse("usage is sent once, at the end; leave it out", False)] = None


class CompletionFields(base.SamplingFields):
    """The fields that `/v1/completions` has too."""

    n: int | None = Field(default=None, ge=1, le=base.MAX_CHOICES)
    stop: base.StopStrings = None
    stream_options: _StreamOptions | None = None


class _Request(CompletionFields):
    """The fields of OpenAI's reference."""

    messages: Annotated[base.Items[_Message], Field(min_length=1)]
    tools: base.Items[_Tool] | None = None
    tool_choice: Annotated[_ToolChoice | None, BeforeValidator(base.as_choice)] = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    reasoning_effort: JsonValue = None
    # OpenRouter's and DeepSeek's APIs use this name for the effort.
    reasoning: JsonValue = None
    thinking: JsonValue = None
    verbosity: JsonValue = None
    functions: Annotated[JsonValue, refuse("use tools instead of functions", [])] = None
    function_call: Annotated[JsonValue, refuse("use tool_choice instead of function_call", "none")] = None
    audio: Annotated[JsonValue, refuse("this model has no audio")] = None
    modalities: Annotated[JsonValue, refuse("this model speaks text only", [], ["text"])] = None
    moderation: Annotated[JsonValue, refuse("nothing is moderated here; leave it out")] = None
    web_search_options: Annotated[JsonValue, refuse("there is no web search here; offer one as a tool")] = None


class OpenAIChat(Dialect):
    """The dialect of `POST /v1/chat/completions`."""

    name = "openai_chat"
    path = "/chat/completions"
    appended_field = "messages"

    def parse(self, body: bytes) -> ModelCall:
        request = base.read(_Request, body, _HARMLESS)
        choice = request.tool_choice or _ToolChoice(type="auto")
        if choice.type == "function" and choice.function is None:
            raise refused("tool_choice.function", "is missing; name the function that must be called")
        form = request.response_format or _ResponseFormat(type="text")
        schema = form.json_schema or _JsonSchema()
        images = ImageReader(self._images, _TEXT_ONLY)
        call = ModelCall(
            model=request.model,
            messages=[
                _plain(message, f"messages.{i}", images, self._separators)
                for i, message in enumerate(request.messages)
            ],
            images=images.found,
            tools=request.tools or None,
            tool_choice="required" if choice.type == "function" else choice.type,
            tool_name=choice.function.name if choice.type == "function" and choice.function else None,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            json_schema=base.schema_of(form.type, schema.json_schema, "response_format.json_schema.schema"),
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            stop=request.stop or (),
            n=request.n or 1,
            logprobs=bool(request.logprobs),
            stream=bool(request.stream),
            sampling=base.sampling_of(request, "reasoning_effort", "reasoning", "thinking", "verbosity"),
            ignored=base.ignored(body, request.model_extra),
            dialect_data=bool(request.stream_options and request.stream_options.include_usage),
        )
        if call.tool_choice == "required":
            base.check_forced(call.tool_name, call.tools)
        return call

    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"refusal": None, **choice.message},
                "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(answer.choices)
        ]
        head = _head("chat.completion", answer.id, answer.created, answer.model)
        return {**head, "choices": choices, "usage": usage(answer)}

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream:
        return ChatEvents(call, _head("chat.completion.chunk", answer_id, created, model))


# --- the request ------------------------------------------------------------------------------------------


def _plain(message: _Message, where: str, images: ImageReader, separators: base.Separators) -> Message:
    role = "system" if message.role == "developer" else message.role
    separator = {"assistant": "", "tool": separators.result}.get(role, separators.message)
    plain: Message = {"role": role, "content": _content(message, where, images, separator)}
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.role == "assistant":
        if message.tool_calls:
            plain["tool_calls"] = []
            for i, call in enumerate(message.tool_calls):
                at = f"{where}.tool_calls.{i}.function.arguments"
                function = {"name": call.function.name, "arguments": base.call_arguments(call.function.arguments, at)}
                plain["tool_calls"].append({**call.model_dump(exclude_none=True), "function": function})
        thoughts = "".join(_text(part) for part in message.content or () if part.type in _REASONING)
        if (reasoning := message.reasoning_content or message.reasoning or thoughts or None) is not None:
            plain["reasoning_content"] = reasoning
    elif message.role == "user" and message.content is None:
        # SGLang refuses such a message as well.
        raise refused(f"{where}.content", "is missing")
    return plain


def _content(message: _Message, where: str, images: ImageReader, separator: str) -> str | list[dict[str, Any]]:
    pieces: list[str | Image] = []
    for i, part in enumerate(message.content or ()):
        at = f"{where}.content.{i}"
        if part.type in _REASONING and message.role == "assistant":
            continue
        if part.type == "image_url" and part.image_url is not None:
            image = images.url(part.image_url.url, at)
            if message.role not in ("user", "tool"):
                raise refused(at, f"a {message.role} message cannot hold an image")
            pieces.append(image)
        elif part.type in _TEXTS:
            pieces.append(_text(part))
        else:
            raise refused(at, f"parts of type {part.type!r} are not supported, only text is")
    if message.refusal:
        if any(pieces):
            raise refused(f"{where}.refusal", "a reply is content or a refusal; send one of the two")
        pieces = [message.refusal]
    return base.message_content(pieces, separator)


def _text(part: _Part) -> str:
    """Return the text of a part. Mistral's thinking and summaries of reasoning are lists of parts."""
    value: Any = next(filter(None, (getattr(part, field) for field in _TEXTS[part.type])), "")
    if isinstance(value, list):
        return "".join(str(each.get("text") or "") for each in value if isinstance(each, dict))
    return str(value)


# --- the answer -------------------------------------------------------------------------------------------


def _head(kind: str, answer_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": created, "model": model}


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def _logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    return {"content": list(entries), "refusal": None} if entries else None


class ChatEvents(EventStream):
    """Writes the chunks of a stream; those of `/v1/completions` differ in `_chunk`."""

    def __init__(self, call: ModelCall, head: Mapping[str, Any]) -> None:
        self._include_usage: bool = call.dialect_data
        self._head = head
        # Tool calls and logprobs written so far, by choice.
        self._calls = [0] * call.n
        self._given = [0] * call.n

    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        for i in range(len(self._calls)):
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.tool_call is not None:
            call = {"index": self._calls[delta.choice], **delta.tool_call}
            self._calls[delta.choice] += 1
            yield self._chunk(delta.choice, {"tool_calls": [call]}, delta.logprobs)
        elif delta.text:
            field = "reasoning_content" if delta.kind == "reasoning" else "content"
            yield self._chunk(delta.choice, {field: delta.text}, delta.logprobs)

    def end(self, answer: Answer) -> Iterator[bytes]:
        for i, choice in enumerate(answer.choices):
            yield self._chunk(i, {}, (choice.logprobs or ())[self._given[i] :], choice.finish_reason)
        if self._include_usage:
            yield base.data_event({**self._head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield base.data_event(base.openai_error(error))

    def _chunk(
        self, i: int, said: Any, logprobs: Sequence[Mapping[str, Any]] = (), reason: str | None = None
    ) -> bytes:
        self._given[i] += len(logprobs)
        choice = {"index": i, "delta": said, "logprobs": _logprobs(logprobs), "finish_reason": reason}
        return base.data_event({**self._head, "choices": [choice]})
