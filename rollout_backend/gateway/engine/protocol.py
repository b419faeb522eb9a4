"""What differs between engines: the body of a request for tokens, and how its reply is read.

Invariants:

- A reader returns each token once, with the logprob that the engine gives for it. A missing logprob is None.
- Spans of weight versions cover all tokens of a reply in order, or there are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_backend.core.images import PlacedImage
from rollout_backend.errors import ServingError

STREAM_INTERVAL = 8
"""Tokens per piece of a stream. Each piece costs the engine a message, and the gateway a turn of its event loop."""

Span = tuple[str, int, int]
"""A weight version, and the first token of a reply that it sampled, and the one after its last."""


class PromptDiffers(ServingError):
    """The engine built a different prompt from the images, so its reply cannot be recorded."""


class EngineRequest(NamedTuple):
    """A request for the continuation of `prompt`. `params` are SGLang's sampling parameters."""

    prompt: Sequence[int]
    params: Mapping[str, Any]
    images: Sequence[PlacedImage] = ()
    stop_strings: Sequence[str] = ()
    stream: bool = False
    experts_from: int | None = None
    """The first token whose routing is wanted, in a mixture of experts. None: no routing is wanted."""
    adapter: str = ""
    """The engine's name of the LoRA adapter to sample with; empty for the model without an adapter."""


class Tokens(NamedTuple):
    """Tokens that a reader has not returned before."""

    ids: list[int]
    logprobs: list[float | None]


class ReplyReader(Protocol):
    """Reads the reply to one request: a whole reply, or all pieces of a stream in order."""

    finish: Mapping[str, Any] | None
    """How the generation ended: `type` is `stop`, `length` or `abort`. None before its end."""
    received: int
    """The tokens read so far."""

    @property
    def cached_tokens(self) -> int | None:
        """The tokens of the prompt that were in the engine's prefix cache; None if it does not report them."""
        ...

    def read(self, reply: Mapping[str, Any]) -> Tokens:
        """Return the new tokens of a whole reply, or of the next piece.

        Raises:
            LookupError, TypeError, ValueError: the reply has another form.
            PromptDiffers: the engine built another prompt from the images.
        """
        ...

    def spans(self) -> list[Span] | None:
        """Return the weight versions of the tokens read; None if the engine gives none."""
        ...

    def experts(self) -> NDArray[np.uint8] | None:
        """Return the routing of all tokens from the request's `experts_from` to the last but one, as rows of
        `core.routed_experts.pack`; None if the reply lacks that of any of them.

        Raises:
            ValueError: the routing is not one of the model.
        """
        ...


class EngineProtocol(Protocol):
    """The HTTP interface of one kind of engine."""

    path: str
    """The path of requests for tokens."""
    abort_path: str | None
    """The path that ends a request by its `rid`; None if there is none."""
    needs_direct_calls: bool
    """True if no router forwards these requests, so that the gateway selects the engine."""
    keepalive_s: float
    """How long an idle connection may be reused. Shorter than the server's own limit."""

    def body(self, request: EngineRequest) -> dict[str, Any]: ...

    def reader(self, request: EngineRequest) -> ReplyReader: ...


def finite(logprob: Any) -> float | None:
    """Return the logprob, or None if it is no finite number."""
    return float(logprob) if isinstance(logprob, (int, float)) and math.isfinite(logprob) else None


def covering(listed: Sequence[Mapping[str, Any]], n: int) -> list[Span] | None:
    """Return the spans of an engine's list if they cover `n` tokens in order, else None."""
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in listed]
    at = 0
    for _, start, end in spans:
        if start != at or end < at:
            return None
        at = end
    return spans if at == n else None
