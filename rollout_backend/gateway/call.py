"""A model call without a dialect: what an agent asks, and what it is told. Dialects translate to and from these.

What must always hold: the same conversation gives the same messages in every dialect, so that a session's turns
join up whichever of them a call came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.images import Image

Message = dict[str, Any]
"""As it is rendered, compared and stored. `role` is system, user, assistant or tool; `content` one string or, where
images stand in it, a list of parts: `{"type": "text", "text"}` and `{"type": "image_url", "image_url": {"url":
"sha256:NAME"}}`, an image by the SHA-256 of its bytes. Where they apply: `name`, `tool_call_id`, `reasoning_content`,
and `tool_calls`, each `{"id", "type": "function", "function": {"name", "arguments": JSON text}}`."""


@dataclass(frozen=True)
class ModelCall:
    """A checked request."""

    model: str
    messages: Sequence[Message]
    images: Mapping[str, Image] = field(default_factory=dict)
    """Those that the messages name, each under its SHA-256."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Each in the form of OpenAI's chat: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The one tool that must be called; only with `required`."""
    parallel_tool_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    """The answer must be JSON of this schema; {"type": "object"} where any object will do."""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    wishes: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling settings that the agent gave (temperature, top_p, top_k, seed, and others by their name in OpenAI's
    API). The trainer's own win, unless the settings let the agent decide."""
    own: Any = None
    """The dialect's own: what it needs again when it writes the answer, and nobody else reads."""


@dataclass(frozen=True)
class Choice:
    """One sampled reply. `message` is an assistant's `Message`, whose `content` may be None beside tool calls."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    sampled_tokens: int
    matched_stop: str | None = None  # the stop string that ended it
    logprobs: Sequence[Mapping[str, Any]] | None = None  # as OpenAI's chat has them, one for each token


@dataclass(frozen=True)
class Answer:
    id: str  # hexadecimal; a dialect puts its own prefix before it
    created: int  # unix seconds
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt tokens, those found in an engine's prefix cache

    @property
    def sampled_tokens(self) -> int:
        return sum(choice.sampled_tokens for choice in self.choices)


@dataclass(frozen=True)
class Delta:
    """A piece of a reply while it is sampled. Pieces of one choice, put together, are the choice's message.

    Reasoning and text come as they are sampled; a tool call comes whole, once all of it was sampled.
    """

    kind: Literal["reasoning", "text", "tool_call"]
    text: str = ""
    tool_call: Mapping[str, Any] | None = None  # one entry of `Message["tool_calls"]`
    choice: int = 0


class EventStream(Protocol):
    """Writes one answer as server-sent events, each ended by an empty line."""

    def start(self, prompt_tokens: int) -> Iterator[bytes]: ...

    def delta(self, delta: Delta) -> Iterator[bytes]: ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """What follows the last delta. All of the answer's text and calls have been deltas by then."""
        ...

    def failed(self, error: ApiError) -> Iterator[bytes]: ...

    def keepalive(self) -> bytes:
        """What every client passes over."""
        ...


class Dialect(Protocol):
    """One API. Pure: bodies in, bodies out."""

    name: str

    def parse(self, body: bytes) -> ModelCall:
        """Raises ApiError (400), which names the field at fault. What cannot be honoured and would change the
        agent's meaning is refused; fields that are not known are passed over."""
        ...

    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]: ...

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream: ...

    def error_body(self, error: ApiError) -> dict[str, Any]: ...
