"""The dialect of OpenAI's chat completions: request bodies in, engine parameters and response bodies out. Pure.

What must always hold:

- The trainer's sampling wins. Of the agent's own settings only those in `may_set` count; `max_tokens` and `stop`
  count always, for they end a reply and do not change how its tokens are drawn. The rest is counted as overridden.
- What cannot be honoured and would change the agent's meaning is refused with a message that says so (several
  choices, images, forced tool calls, JSON modes); unknown fields are ignored.
- Nothing that the model said is lost: a tool call that cannot be read is returned as text.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from agent_wrapper.contract import Sampling
from rollout_backend.gateway.engine import Completion
from rollout_backend.gateway.errors import ApiError

_OK_STATUSES = frozenset({"ok", "unknown_tool"})  # that a tool does not exist is for the agent to say
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "seed")
_OTHER_SAMPLING_FIELDS = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias")
_UNSUPPORTED = {
    "functions": "use tools instead of functions",
    "function_call": "use tool_choice instead of function_call",
    "audio": "this model has no audio",
    "modalities": "this model speaks text only",
}


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Part(_Body):
    type: str
    text: str | None = None
    refusal: str | None = None


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


class _StreamOptions(_Body):
    include_usage: bool | None = None


class ChatRequest(_Body):
    """A checked request. Values are those of OpenAI's reference, and `top_k` as an extension."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: JsonValue = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: JsonValue = None
    frequency_penalty: JsonValue = None
    presence_penalty: JsonValue = None
    repetition_penalty: JsonValue = None
    min_p: JsonValue = None
    logit_bias: JsonValue = None
    functions: JsonValue = None
    function_call: JsonValue = None
    audio: JsonValue = None
    modalities: JsonValue = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Checks a request's body.

        Raises:
            ApiError: status 400; names the field at fault.
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or None
            raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where) from None
        request._refuse_unsupported()
        return request

    def _refuse_unsupported(self) -> None:
        if self.n not in (None, 1):
            raise ApiError(400, "n: only one choice for each call; call again for another", param="n")
        if self.top_logprobs:
            raise ApiError(400, "top_logprobs: only the sampled tokens' logprobs can be had", param="top_logprobs")
        if self.response_format not in (None, {"type": "text"}):
            raise ApiError(
                400,
                "response_format: only text; the model is sampled freely, so ask for JSON in the prompt",
                param="response_format",
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise ApiError(
                400,
                "tool_choice: only auto and none; the model is sampled freely, so no call can be forced",
                param="tool_choice",
            )
        for name, advice in _UNSUPPORTED.items():
            if getattr(self, name) not in (None, [], ["text"], "none"):
                raise ApiError(400, f"{name}: {advice}", param=name)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) and self.stop else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as they are rendered, compared and stored: content is one string, nothing is null.

        Raises:
            ApiError: status 400, for content that is not text.
        """
        return [_plain(message, f"messages.{i}") for i, message in enumerate(self.messages)]


def _plain(message: _Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, where),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ApiError(400, f"{where}.tool_call_id: is missing", param=f"{where}.tool_call_id")
        plain["tool_call_id"] = message.tool_call_id
    if message.role == "assistant":
        if message.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
    elif message.content is None:
        raise ApiError(400, f"{where}.content: is missing", param=f"{where}.content")
    return plain


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces = []
    for i, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise ApiError(
                400, f"{where}.content.{i}: parts of type {part.type!r} are not supported, only text is", param=where
            )
        pieces.append(text)
    return "".join(pieces)


# --- what the engine is asked -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineParams:
    """SGLang's sampling parameters, and the agent's settings that did not count."""

    params: dict[str, Any]
    overridden: list[str] = field(default_factory=list)


def engine_params(
    request: ChatRequest,
    sampling: Sampling,
    may_set: Collection[str],
    prompt_tokens: int,
    context_length: int,
    stop_token_ids: Sequence[int],
    seed_salt: str = "",
) -> EngineParams:
    """How this call is sampled.

    The trainer's seed is mixed with `seed_salt`, which differs between calls: with the bare seed all rollouts of a
    group would be the same one. An agent's own seed is used as it is.

    Raises:
        ApiError: status 400 `context_length_exceeded`; the prompt leaves no room for one token.
    """
    left = context_length - prompt_tokens
    if left < 1:
        raise context_exceeded(
            f"this model's context has {context_length} tokens, and the messages alone are {prompt_tokens}"
        )
    values = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    if sampling.seed is not None:
        values["seed"] = zlib.crc32(f"{sampling.seed}/{seed_salt}".encode())
    overridden = [name for name in _OTHER_SAMPLING_FIELDS if getattr(request, name)]
    for name in _SAMPLING_FIELDS:
        asked = getattr(request, name)
        if asked is None:
            continue
        if name in may_set:
            values[name] = asked
        elif asked != getattr(sampling, name):
            overridden.append(name)
    params: dict[str, Any] = {
        "temperature": values["temperature"],
        "top_p": values["top_p"],
        "top_k": values["top_k"] or -1,
        "max_new_tokens": min(limit for limit in (request.max_new_tokens, sampling.max_tokens, left) if limit),
        "stop_token_ids": list(stop_token_ids),
    }
    if values["seed"] is not None:
        params["sampling_seed"] = values["seed"]
    if request.stop_strings:
        params["stop"] = request.stop_strings
    return EngineParams(params, overridden)


def context_exceeded(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param="messages")


# --- what the agent is told -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """The assistant's message as the agent gets it."""

    message: dict[str, Any]
    finish_reason: str
    malformed_tool_calls: int


def read_reply(parsed: Any, completion: Completion, tools_offered: bool, text: str) -> Reply:
    """Makes the message of a `renderers.ParsedResponse`. `text` is the whole completion, for the case that no tools
    were offered: what looks like a call is text then."""
    content = parsed.content if tools_offered or not parsed.tool_calls else text
    if completion.matched is not None:
        content = content.partition(completion.matched)[0]
    calls, malformed = [], 0
    for call in parsed.tool_calls if tools_offered else ():
        if str(call.status) in _OK_STATUSES and call.name:
            calls.append(_tool_call(call))
        else:
            malformed += 1
            if call.raw not in content:
                content = f"{content}\n{call.raw}" if content else call.raw
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = calls
    reason = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
    return Reply(message, reason, malformed)


def _tool_call(call: Any) -> dict[str, Any]:
    arguments = call.arguments if call.arguments is not None else {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id or f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


@dataclass(frozen=True)
class Answer:
    """Everything that a response body says."""

    id: str
    created: int
    model: str
    reply: Reply
    prompt_tokens: int
    completion: Completion
    logprobs: list[dict[str, Any]] | None

    def usage(self) -> dict[str, Any]:
        sampled = len(self.completion.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": self.completion.cached_tokens},
        }

    def _logprobs(self) -> dict[str, Any] | None:
        return None if self.logprobs is None else {"content": self.logprobs, "refusal": None}

    def body(self) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"refusal": None, **self.reply.message},
            "logprobs": self._logprobs(),
            "finish_reason": self.reply.finish_reason,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage()}

    def events(self, include_usage: bool) -> Iterator[bytes]:
        """The server-sent events of the whole answer, ended by `[DONE]`."""
        message = self.reply.message
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
        for i, delta in enumerate(deltas):
            last = i == len(deltas) - 1
            yield self._event([self._choice(delta, logprobs=self._logprobs() if last else None)])
        yield self._event([self._choice({}, finish_reason=self.reply.finish_reason)])
        if include_usage:
            yield self._event([], usage=self.usage())
        yield b"data: [DONE]\n\n"

    def _choice(
        self, delta: Mapping[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head("chat.completion.chunk"), "choices": choices, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def logprob_entry(token: str, logprob: float | None) -> dict[str, Any]:
    known = logprob is not None and math.isfinite(logprob)
    return {
        "token": token,
        "logprob": logprob if known else None,
        "bytes": list(token.encode()),
        "top_logprobs": [],
    }
