"""Define the protocol of an engine: the body of a token request, and a reader of its reply.

Invariants:

- A reader returns each token once, with the logprob that the engine gives for it. A missing logprob is None.
- Spans of weight versions cover all tokens of a reply in order, or are missing altogether.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_backend.core.images import PlacedImage
from rollout_backend.errors import ServingError
from rollout_backend.rendering.token_bytes import StopStrings

STREAM_INTERVAL = 8
"""Tokens per chunk of a stream. Each chunk costs the engine a message and the gateway a turn of its event loop."""

Span = tuple[str, int, int]
"""A weight version with the start and end (exclusive) of the reply's tokens that it sampled."""


class PromptDiffers(ServingError):
    """The engine built a different prompt from the images, so its reply cannot be recorded."""


Progress = Callable[[Sequence[int], Sequence[float | None]], None]
"""Called with all tokens sampled so far and their logprobs, as more arrive. The sequences are reused."""


@dataclass(frozen=True)
class EngineRequest:
    """A request to continue `prompt`. `params` are SGLang's sampling parameters, including `max_new_tokens`."""

    prompt: Sequence[int]
    params: Mapping[str, Any]
    routing_key: str = ""
    """Calls with the same key go to the same engine."""
    images: Sequence[PlacedImage] = ()
    stops: StopStrings | None = None
    progress: Progress | None = None
    resumable: bool = True
    """Whether an aborted generation may continue from the tokens sampled so far. A grammar cannot resume."""
    experts_from: int | None = None
    """Index of the first token whose routing is wanted (mixture of experts); None if no routing is wanted."""
    adapter: str = ""
    """The LoRA adapter to sample with; `body` needs the engine's name of it. Empty for the base model."""

    @property
    def stream(self) -> bool:
        return self.progress is not None or self.stops is not None


class Tokens(NamedTuple):
    """Tokens that a reader returns for the first time."""

    ids: list[int]
    logprobs: list[float | None]


class ReplyReader(Protocol):
    """Reads the reply to one request: a whole reply, or all chunks of a stream in order."""

    finish: Mapping[str, Any] | None
    """How the generation ended: `type` is `stop`, `length` or `abort`. None until it has ended."""
    received: int
    """Number of tokens read so far."""

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens found in the engine's prefix cache; None if the engine does not report it."""
        ...

    def read(self, reply: Mapping[str, Any]) -> Tokens:
        """Return the new tokens of a whole reply, or of the next chunk.

        Raises:
            LookupError, TypeError, ValueError: the reply is malformed.
            PromptDiffers: the engine built a different prompt from the images.
        """
        ...

    def spans(self) -> list[Span] | None:
        """Return the weight versions of the tokens read so far; None if the engine reports none."""
        ...

    def experts(self) -> NDArray[np.uint8] | None:
        """Return the routing of all tokens from the request's `experts_from` to the last but one, as rows of
        `core.routed_experts.pack`; None if any of them is missing from the reply.

        Raises:
            ValueError: the routing does not fit the model.
        """
        ...


class EngineProtocol(Protocol):
    """The HTTP interface of one kind of engine."""

    path: str
    """Path of token requests."""
    abort_path: str | None
    """Path that aborts a request by its `rid`; None if the engine has none."""
    needs_direct_calls: bool
    """True if no router forwards these requests, so the gateway has to select the engine."""
    keepalive_s: float
    """Seconds for which an idle connection may be reused; shorter than the server's own limit."""

    def body(self, request: EngineRequest) -> dict[str, Any]: ...

    def reader(self, request: EngineRequest) -> ReplyReader: ...


def finite(logprob: Any) -> float | None:
    """Return the logprob, or None if it is not a finite number."""
    return float(logprob) if isinstance(logprob, (int, float)) and math.isfinite(logprob) else None


def covering(listed: Sequence[Mapping[str, Any]], n: int) -> list[Span] | None:
    """Return the spans that an engine listed if they cover `n` tokens in order, else None."""
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in listed]
    at = 0
    for _, start, end in spans:
        if start != at or end < at:
            return None
        at = end
    return spans if at == n else None
