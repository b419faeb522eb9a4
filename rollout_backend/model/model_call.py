"""Define requests, responses and errors of model calls, independent of the API. Dialects translate to and from these
types.

Invariant: a conversation yields the same messages in every dialect, so a session may switch dialects between turns.
The exception is a message with several text parts, which dialects may join differently: see `dialects.base`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

from rollout_backend.model.images import Image

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "session_closed",
    413: "request_too_large",
    429: "rate_limit_error",
}
# Engines take minutes to be ready, and clients make a limited number of retries.
_ADOPTION_S = 10
_JOURNAL_S = 10

NO_TOOL_PARSER = (
    "this model's tool calls cannot be parsed. Set model.renderer to the renderer of its family, or tool_parser in "
    "model.renderer_options to the parser of its calls"
)

Message = dict[str, Any]
"""A message as rendered, compared and stored. `role` is system, user, assistant or tool. `content` is a string or,
with images, a list of parts: `{"type": "text", "text"}` and `{"type": "image_url", "image_url": {"url":
"sha256:NAME"}}`, where NAME is the SHA-256 of the image. Optional: `name`, `tool_call_id`, `reasoning_content`, and
`tool_calls`, each `{"id", "type": "function", "function": {"name", "arguments": a JSON string}}`."""


@dataclass(frozen=True)
class ModelCall:
    """A validated request."""

    model: str
    messages: Sequence[Message]
    prompt: str | tuple[int, ...] | None = None
    """The prompt as text or token ids, if the agent sent no messages. `messages` then only identify it."""
    shows_special_tokens: bool = False
    """Whether the returned text includes the names of special tokens. Used only with `prompt`."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """Images of the messages, by SHA-256."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools in the format of OpenAI's chat API: {"type": "function", "function": {"name", "description",
    "parameters"}}."""
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The tool that must be called; set only with `required`."""
    parallel_tool_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    """The JSON schema that the reply must satisfy; {"type": "object"} accepts any object."""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """The agent's sampling settings (temperature, top_p, top_k, seed, and others by their names in OpenAI's API). The
    trainer's settings take precedence, unless the configuration lets the agent decide."""
    ignored: frozenset[str] = frozenset()
    """Names of ignored fields, which concern only the provider or which the template does not render."""
    dialect_data: Any = None
    """Private data that the dialect needs to write the response."""

    def without_question(self) -> Self:
        """Return the call without its messages, images and tools, which the next call of its conversation repeats."""
        return replace(self, messages=(), prompt=None, images={}, tools=None, json_schema=None, stop=())

    @property
    def offers_tools(self) -> bool:
        """Whether the reply may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @cached_property
    def call_ids(self) -> frozenset[str]:
        """The ids of the tool calls in the messages."""
        calls = (call for message in self.messages for call in message.get("tool_calls") or ())
        return frozenset(call["id"] for call in calls if call.get("id"))

    @property
    def is_constrained(self) -> bool:
        """Whether the reply must be a tool call or follow a JSON schema."""
        return self.tool_choice == "required" or self.json_schema is not None


@dataclass(frozen=True)
class Choice:
    """One sampled reply. `message` is an assistant's `Message`, whose `content` may be None if it has tool calls."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    sampled_tokens: int
    matched_stop: str | None = None
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """One entry per token, in the format of OpenAI's chat API."""
    reasoning_tokens: int = 0
    # Calls that could not be parsed stay in the text. Extra ones are dropped if `parallel_tool_calls` is false.
    malformed_tool_calls: int = 0
    extra_tool_calls: int = 0


@dataclass(frozen=True)
class Answer:
    # `id` is hexadecimal, and dialects add their own prefix. `created` is in unix seconds.
    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int | None = None
    """Number of prompt tokens found in an engine's prefix cache; None if unknown."""

    @property
    def sampled_tokens(self) -> int:
        return sum(choice.sampled_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)


@dataclass(frozen=True)
class Delta:
    """A part of a streamed reply. The parts of a choice add up to its message.

    Reasoning and text are streamed as they are sampled. A tool call is sent when it is complete.
    """

    kind: Literal["reasoning", "text", "tool_call"]
    text: str = ""
    tool_call: Mapping[str, Any] | None = None
    choice: int = 0
    logprobs: Sequence[Mapping[str, Any]] = ()
    """Logprobs of the tokens since the previous delta, if the call requested any."""


def whole_deltas(said: Message, choice: int = 0, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Delta]:
    """Return the deltas of a whole message, with the logprobs of all its tokens."""
    deltas = [
        Delta("reasoning", said.get("reasoning_content") or "", choice=choice),
        Delta("text", said.get("content") or "", choice=choice),
        *(Delta("tool_call", tool_call=call, choice=choice) for call in said.get("tool_calls") or ()),
    ]
    return with_logprobs([delta for delta in deltas if delta.text or delta.tool_call], logprobs)


def with_logprobs(deltas: list[Delta], logprobs: Sequence[Mapping[str, Any]]) -> list[Delta]:
    """Return the deltas with these logprobs on the last one. Without deltas, the end of the answer carries them."""
    return [*deltas[:-1], replace(deltas[-1], logprobs=logprobs)] if deltas and logprobs else deltas


# --- errors ---------------------------------------------------------------------------------------------------


class ApiError(Exception):
    """A response other than 200. Errors are counted by `code`.

    `retry_after_s` asks the client to retry; `permanent`, on a 5xx, asks it not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        permanent: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or ("invalid_request" if status == 400 else self.type)
        self.param = param
        self.retry_after_s = retry_after_s
        self.permanent = permanent

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        # Unauthenticated clients must not hold connections.
        if self.status in (401, 404):
            headers["Connection"] = "close"
        # OpenAI's and Anthropic's clients follow this header.
        return {**headers, "x-should-retry": "false"} if self.permanent else headers


def context_exceeded(context_tokens: int, why: str) -> ApiError:
    # Agents shorten their history after an overflow. LiteLLM detects one by this message of OpenAI and vLLM.
    message = f"This model's maximum context length is {context_tokens} tokens, and {why}"
    return ApiError(400, message, code="context_length_exceeded", param="messages")


def not_adopted() -> ApiError:
    return ApiError(
        503,
        "the trainer restarted and has not resumed this session yet; retry later",
        code="not_adopted",
        retry_after_s=_ADOPTION_S,
    )


def journal_unwritable() -> ApiError:
    return ApiError(
        503,
        "the gateway can neither write the journal of this session nor note that it is incomplete, so the session is "
        "closed; see the gateway's log",
        code="journal_unwritable",
    )


def journal_unreadable(why: str) -> ApiError:
    return ApiError(
        503,
        f"the gateway has restarted and cannot read the journal of this session: {why}; retry later",
        code="journal_unreadable",
        retry_after_s=_JOURNAL_S,
    )


def session_lost() -> ApiError:
    return ApiError(
        410,
        "the tokens that this session has sampled are lost with the journal of its gateway. The rollout is repeated",
        code="session_lost",
    )


def trajectory_too_large(why: str, status: int = 413) -> ApiError:
    return ApiError(
        status,
        f"the trajectory of this session is larger than a result may be ({why}): raise "
        "storage.max_result_bytes, or let the agent rewrite its history less often, because each rewriting opens a "
        "segment",
        code="trajectory_too_large",
    )


def session_closed(why: str) -> ApiError:
    return ApiError(410, f"this session is closed ({why}); it cannot call the model any more", code="session_closed")
