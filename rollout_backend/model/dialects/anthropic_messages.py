"""Speak Anthropic's Messages API: `POST /v1/messages` and its `count_tokens`. Pure.

Invariants:

- A conversation becomes the same messages as in OpenAI's Chat Completions API. The assistant's blocks form one
  message: their texts are joined, `thinking` becomes `reasoning_content`, and each `tool_use` a tool call with
  its input as JSON text. Each `tool_result` in a user's turn is a separate message, in order, before the turn's text.
- An answer sent back as history becomes the message that was sampled. Arguments that JSON in UTF-8 cannot represent
  (half of a surrogate pair) are returned as {"INVALID_JSON": "the sampled text"}, the form that Anthropic documents
  for clients, and such an input is converted back to that text.
- Input that the model cannot process is refused: documents, images for a text-only model, a prefilled reply. Ignored
  are `cache_control`, signatures, `redacted_thinking`, and options that only save the provider's tokens: the model
  sees all tools, even deferred ones, and the whole history. The trainer controls thinking.
- Tools that Anthropic runs, or on which it trains its models, are left out and counted, as SGLang does.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from rollout_backend.model.dialects import base
from rollout_backend.model.dialects.base import Body, Dialect, EventStream, ImageReader, refuse, refused
from rollout_backend.model.images import Image
from rollout_backend.model.model_call import Answer, ApiError, Choice, Delta, Message, ModelCall

_TEXT_ONLY = "image blocks cannot be read: this model takes text only, so send what it says as text"
_INVALID = "INVALID_JSON"
# Clients require a signature with thinking. It is ignored when they send it back.
_SIGNATURE = "unsigned"
# Claude Code's accounting: a line of the system prompt whose hash changes with every call. If it were kept, each turn
# would start a new conversation.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_LEFT_OUT = "a tool of Anthropic's"
_HOSTED = re.compile(
    r"(bash|text_editor|computer|memory|web_search|web_fetch|code_execution|advisor|(browser|computer)_toolset)_\d{8}"
    r"|tool_search_tool_(bm25|regex)(_\d{8})?|mcp_toolset"
)
_RUN_BY_AGENTS = re.compile(r"(bash|text_editor|computer|memory|(browser|computer)_toolset)_\d{8}")
_HARMLESS = frozenset(
    {
        *("inference_geo", "user_profile_id", "fallback_credit_token"),
        *("billing_policy", "cache_control", "context_management", "diagnostics", "speed", "workspace_id"),
        # The fields of betas are checked individually.
        "betas",
    }
)
# With these details, the SDK's tool runner sends whole conversations.
_DETAILS: Mapping[str | None, Mapping[str, Any]] = {
    "thread": {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}},
}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# --- the request ------------------------------------------------------------------------------------------


def _is_text(block: object) -> object:
    if isinstance(block, dict) and block.get("type") in ("image", "document"):
        raise ValueError(f"{block['type']} blocks cannot be read: this field takes text only")
    return block


_NoToolset = Annotated[Any, refuse("there are no toolsets here; leave it out")]


class _Text(Body):
    type: Literal["text"]
    text: str


class _Thinking(Body):
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(Body):
    type: Literal["redacted_thinking"]


class _ToolUse(Body):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: base.JsonObject | None = None
    caller: Annotated[Any, refuse("only the model itself calls tools here; leave it out", {"type": "direct"})] = None
    toolset_name: _NoToolset = None


class _Source(Body):
    type: str | None = None
    data: str | None = None


class _Media(Body):
    type: Literal["image", "document"]
    source: _Source
    transformations: Annotated[Any, refuse("images are never transformed; omit this field")] = None


class _ToolReference(Body):
    """A tool that the client's own search found. The model sees all tools, so the result is only its name."""

    type: Literal["tool_reference"]
    text: str = Field(alias="tool_name")


_Texts = Annotated[base.Items[Annotated[_Text, BeforeValidator(_is_text)]], BeforeValidator(base.as_texts)]
_Shown = Annotated[
    base.Items[Annotated[_Text | _Media | _ToolReference, Field(discriminator="type")]],
    BeforeValidator(base.as_texts),
]


class _ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: _Shown | None = None
    is_error: bool | None = None
    toolset_name: _NoToolset = None


_Block = Annotated[
    _Text | _Media | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, Field(discriminator="type")
]


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[base.Items[_Block], BeforeValidator(base.as_texts)]
    clear_at: Annotated[Any, refuse("messages are shown until you leave them out", "never")] = None
    output_config: Any = None


def _tool_kind(tool: object) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "custom" if kind is None else _LEFT_OUT if _HOSTED.fullmatch(str(kind)) else str(kind)


class _Tool(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: base.JsonObject
    strict: bool | None = None
    allowed_callers: Annotated[Any, refuse("only the model itself calls tools here; leave it out", ["direct"])] = None
    input_examples: Annotated[Any, refuse("are not shown to the model; put them into the description", [])] = None


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(Body):
    type: Literal["json_schema"]
    json_schema: base.JsonObject = Field(alias="schema")


class _OutputConfig(Body):
    format: _Format | None = None
    effort: Any = None
    task_budget: Annotated[Any, refuse("the model is not shown a task budget; write it into the prompt")] = None


class _Conversation(Body):
    """The fields of both request types."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: base.Items[_Message]
    system: _Texts | None = None
    tools: (
        base.Items[
            Annotated[
                Annotated[_Tool, Tag("custom")] | Annotated[base.HostedTool, Tag(_LEFT_OUT)],
                Discriminator(_tool_kind),
            ]
        ]
        | None
    ) = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    # `output_config.format` replaces this field.
    output_format: _Format | None = None
    thinking: Any = None
    mcp_servers: Annotated[
        Any, refuse("are not called from here; let the agent call them, and offer them as tools", [])
    ] = None
    container: Annotated[Any, refuse("there are no containers here; leave it out")] = None
    thread: Annotated[Any, refuse("conversations are not stored here; send the whole conversation")] = None
    fallbacks: Annotated[Any, refuse("there is no other model here; leave it out", [])] = None


class _Request(base.SamplingFields, _Conversation):
    # 0 fills Anthropic's prompt cache, and samples nothing.
    max_tokens: int = Field(ge=0)
    compaction: Annotated[Any, refuse("nothing is summarized here; ask the model for a summary")] = None
    stop_sequences: base.StopStrings = None


class AnthropicMessages(Dialect):
    """The dialect of `POST /v1/messages`."""

    name = "anthropic_messages"
    path = "/messages"
    count_path = "/messages/count_tokens"
    client_header = "anthropic-version"

    def parse(self, body: bytes) -> ModelCall:
        request = base.read(_Request, body, _HARMLESS)
        if request.messages and request.messages[-1].role == "assistant":
            raise refused(
                f"messages.{len(request.messages) - 1}",
                "the conversation must end with a user message; this model cannot continue a prefilled reply",
            )
        if not request.max_tokens and request.stream:
            raise refused("max_tokens", "is 0, which samples nothing to stream; send stream: false")
        effort = request.output_config and request.output_config.effort
        effort = effort or any(message.output_config for message in request.messages)
        return _call(
            request,
            ImageReader(self._images, _TEXT_ONLY),
            self._separators,
            max_new_tokens=request.max_tokens,
            stop=request.stop_sequences or (),
            stream=bool(request.stream),
            ignored=base.ignored(body, request.model_extra, request.tools or ()),
            sampling=base.sampling_of(request, "thinking") | ({"reasoning_effort": True} if effort else {}),
        )

    def parse_count(self, body: bytes) -> ModelCall:
        request = base.read(_Conversation, body, _HARMLESS | _Request.model_fields.keys())
        return _call(request, ImageReader(self._images, _TEXT_ONLY), self._separators)

    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        return {
            **_head(answer.id, answer.model),
            "content": _blocks(choice.message),
            **_stop(choice),
            "usage": _usage(answer),
        }

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream:
        return _Events(answer_id, model)

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return _error(error)


def _call(request: _Conversation, images: ImageReader, separators: base.Separators, **more: Any) -> ModelCall:
    choice = request.tool_choice or _ToolChoice(type="auto")
    forced = choice.type in ("any", "tool")
    if choice.type == "tool" and choice.name is None:
        raise refused("tool_choice.name", "is missing; name the tool that must be called")
    output_format = (request.output_config and request.output_config.format) or request.output_format
    tools = [tool for tool in request.tools or () if isinstance(tool, _Tool)]
    left_out = [tool.type for tool in request.tools or () if isinstance(tool, base.HostedTool)]
    if not tools and (run_by_the_agent := [kind for kind in left_out if _RUN_BY_AGENTS.fullmatch(kind)]):
        raise refused(
            "tools",
            f"has only tools that Anthropic trains its own models on, such as {run_by_the_agent[0]!r}; define a tool "
            "with an input_schema instead",
        )
    call = ModelCall(
        model=request.model,
        messages=_messages(request, images, separators),
        images=images.found,
        tools=[base.chat_tool(t.name, t.description, t.input_schema, t.strict) for t in tools] or None,
        tool_choice="required" if forced else "none" if choice.type == "none" else "auto",
        tool_name=choice.name if choice.type == "tool" else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        json_schema=output_format.json_schema if output_format else None,
        **more,
    )
    if forced:
        base.check_forced(call.tool_name, call.tools)
    if not request.messages:
        raise refused("messages", "is empty; there is nothing to reply to")
    return call


def _messages(request: _Conversation, images: ImageReader, separators: base.Separators) -> list[Message]:
    plain: list[Message] = []
    system = [_BILLING.sub("", block.text) for block in request.system or ()]
    if shown := separators.system.join(filter(None, system)):
        plain.append({"role": "system", "content": shown})
    for role, turn in groupby(enumerate(request.messages), key=lambda numbered: numbered[1].role):
        if role == "assistant":
            # The API joins consecutive assistant messages.
            plain.append(_assistant(turn))
        else:
            for i, message in turn:
                plain += _given(message, f"messages.{i}", images, separators)
    return plain


def _given(message: _Message, where: str, images: ImageReader, separators: base.Separators) -> Iterator[Message]:
    """Return the messages of a user's or system turn."""
    said: list[str | Image] = []
    results = 0
    for i, block in enumerate(message.content):
        at = f"{where}.content.{i}"
        if isinstance(block, _Text):
            said.append(block.text)
        elif isinstance(block, _Media) and message.role == "user":
            said.append(_image(block, at, images))
        elif isinstance(block, _ToolResult) and message.role == "user":
            results += 1
            parts = [
                _image(part, f"{at}.tool_result.content.{j}", images) if isinstance(part, _Media) else part.text
                for j, part in enumerate(block.content or ())
            ]
            content = base.message_content(parts, separators.result)
            if block.is_error and not content:
                content = "Error"
            yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        else:
            raise refused(at, f"a {message.role} message cannot hold a {block.type} block")
    if said or not results:
        yield {"role": message.role, "content": base.message_content(said, separators.message)}


def _image(block: _Media, where: str, images: ImageReader) -> Image:
    # Claude Code learns from this path what to leave out.
    where, source = f"{where}.{block.type}", block.source
    if block.type == "document":
        raise refused(where, "documents are not supported: send the content as text")
    if images.taken and (source.type != "base64" or source.data is None):
        raise refused(where, "images are not fetched: send the image itself, as a source of type base64")
    return images.base64(source.data or "", where)


def _assistant(messages: Iterable[tuple[int, _Message]]) -> Message:
    texts, thoughts, calls = [], [], []
    for i, message in messages:
        for j, block in enumerate(message.content):
            if isinstance(block, _Text):
                texts.append(block.text)
            elif isinstance(block, _Thinking):
                thoughts.append(block.thinking)
            elif isinstance(block, _ToolUse):
                given = block.input or {}
                is_text = _is_wrapped(given) and base.is_object(given[_INVALID])
                arguments = str(given[_INVALID]) if is_text else json.dumps(given, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, (_Media, _ToolResult)):
                raise refused(f"messages.{i}.content.{j}", f"an assistant message cannot hold a {block.type} block")
    plain: Message = {"role": "assistant", "content": "".join(texts)}
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    return plain


def _input(arguments: str) -> dict[str, Any]:
    value = base.read_object(arguments)
    # Also wrap an input that already looks wrapped, because parsing removes one layer.
    return {_INVALID: arguments} if value is None or _is_wrapped(value) else value


def _is_wrapped(tool_input: Mapping[str, Any]) -> bool:
    return len(tool_input) == 1 and isinstance(tool_input.get(_INVALID), str)


# --- the answer -------------------------------------------------------------------------------------------


def _head(answer_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": model}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": _SIGNATURE})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    return blocks + [
        {**_tool_use(call), "input": _input(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _stop(choice: Choice) -> dict[str, str | None]:
    reason, matched = "end_turn", None
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif choice.finish_reason == "tool_calls":
        reason = "tool_use"
    elif choice.matched_stop is not None:
        reason, matched = "stop_sequence", choice.matched_stop
    return {"stop_reason": reason, "stop_sequence": matched, "stop_details": None}


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the usage. In this API, input tokens exclude cached tokens."""
    return {
        "input_tokens": answer.prompt_tokens - (answer.cached_tokens or 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens or 0,
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        # Agents recognise an overflow by these words.
        message = f"prompt is too long: {message}"
    detail = {"type": kind, "message": message}
    return {"type": "error", "error": {**detail, **_DETAILS.get(error.param, {})}, "request_id": None}


class _Events:
    """Writes blocks in order, and closes each before it opens the next."""

    def __init__(self, answer_id: str, model: str) -> None:
        self._head = _head(answer_id, model)
        self._index = 0
        # The type of the deltas in the open block.
        self._open: str | None = None

    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        usage = {
            # This includes cached tokens, whose number is known only at the end.
            "input_tokens": prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=message)

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.kind == "tool_call":
            assert delta.tool_call is not None
            yield from self._switch("tool_call", _tool_use(delta.tool_call))
            tool_input = json.dumps(_input(delta.tool_call["function"]["arguments"]), ensure_ascii=False)
            yield self._piece("input_json_delta", partial_json=tool_input)
            yield from self._close()
        elif not delta.text:
            return
        elif delta.kind == "reasoning":
            yield from self._switch("reasoning", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece("thinking_delta", thinking=delta.text)
        else:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._piece("text_delta", text=delta.text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=_stop(answer.choices[0]), usage=_usage(answer))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield base.event("error", _error(error))

    def keepalive(self) -> bytes:
        return _event("ping")

    def _switch(self, kind: str, block: Mapping[str, Any]) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            yield _event("content_block_start", index=self._index, content_block=block)
            self._open = kind

    def _piece(self, kind: str, **more: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **more})

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "reasoning":
            yield self._piece("signature_delta", signature=_SIGNATURE)
        yield _event("content_block_stop", index=self._index)
        self._index += 1
        self._open = None


def _event(name: str, **fields: Any) -> bytes:
    return base.event(name, {"type": name, **fields})
