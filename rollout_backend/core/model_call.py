"""Requests and responses of model calls, independent of the API. Dialects translate to and from these types.

Invariant: a conversation gives the same messages in every dialect, so a session may mix dialects between its turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_backend.core.images import Image

Message = dict[str, Any]
"""A message as rendered, compared and stored. `role` is system, user, assistant or tool. `content` is a string or,
with images, a list of parts: `{"type": "text", "text"}` and `{"type": "image_url", "image_url": {"url":
"sha256:NAME"}}`, an image by the SHA-256 of its bytes. Optional: `name`, `tool_call_id`, `reasoning_content`,
and `tool_calls`, each `{"id", "type": "function", "function": {"name", "arguments": JSON text}}`."""


@dataclass(frozen=True)
class ModelCall:
    """A validated request."""

    model: str
    messages: Sequence[Message]
    prompt: str | tuple[int, ...] | None = None
    """The prompt itself, if the agent sent no messages: a text or token ids. `messages` then only identify it."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """The images of the messages, by SHA-256."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """In the format of OpenAI's chat API: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The tool that must be called; only with `required`."""
    parallel_tool_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    """The reply must be JSON of this schema; {"type": "object"} if any object is accepted."""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling settings that the agent gave (temperature, top_p, top_k, seed, and others by their name in OpenAI's
    API). The trainer's own win, unless the settings let the agent decide."""
    ignored: frozenset[str] = frozenset()
    """The fields that were given and not used, because they only concern the provider or this template shows none."""
    dialect_data: Any = None
    """Private data of the dialect, which it needs to write the response."""

    @property
    def is_constrained(self) -> bool:
        """Whether the call prescribes the form of its reply."""
        return self.tool_choice == "required" or self.json_schema is not None


@dataclass(frozen=True)
class Choice:
    """One sampled reply. `message` is an assistant's `Message`, whose `content` may be None if it has tool calls."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    sampled_tokens: int
    matched_stop: str | None = None  # the stop string that ended it
    logprobs: Sequence[Mapping[str, Any]] | None = None  # as OpenAI's chat has them, one for each token
    reasoning_tokens: int = 0  # of the sampled tokens


@dataclass(frozen=True)
class Answer:
    id: str  # hexadecimal; a dialect puts its own prefix before it
    created: int  # unix seconds
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int | None = None  # of the prompt tokens, those in an engine's prefix cache; None: unknown

    @property
    def sampled_tokens(self) -> int:
        return sum(choice.sampled_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)


@dataclass(frozen=True)
class Delta:
    """A part of a streamed reply. The concatenated parts of one choice are the choice's message.

    Reasoning and text are streamed as they are sampled. A tool call is sent complete, after all of it was sampled.
    """

    kind: Literal["reasoning", "text", "tool_call"]
    text: str = ""
    tool_call: Mapping[str, Any] | None = None  # one entry of `Message["tool_calls"]`
    choice: int = 0
    logprobs: Sequence[Mapping[str, Any]] = ()  # where wanted: of the tokens since the piece before
