"""Define requests to engines: their sampling parameters, and the protocol that writes them and reads the replies.

Requests have SGLang's sampling parameters, which `vllm` translates.

Invariants:

- The trainer's sampling has precedence. The agent's settings apply only if `agent_sampling_overrides` names them; the
  others are counted as overridden.
- The agent's `max_tokens` always applies, because it ends a reply without changing the distribution of its tokens.
- A reader returns each token once, with the logprob that the engine gives for it. A missing logprob is None.
- Spans of weight versions cover all tokens of a reply in order, or are missing altogether.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent_wrapper.contract import Sampling
from rollout_backend.core.images import PlacedImage
from rollout_backend.core.model_call import ApiError, ModelCall, context_exceeded
from rollout_backend.core.tasks import planned_id
from rollout_backend.errors import ServingError
from rollout_backend.rendering.token_bytes import StopStrings

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_MISSING_LOGPROB = -9999.0  # from vLLM, also for minus infinity

STREAM_INTERVAL = 8
"""Tokens per chunk of a stream. Each chunk costs the engine a message and the gateway a turn of its event loop."""

Span = tuple[str, int, int]
"""A weight version with the start and end (exclusive) of the reply's tokens that it sampled."""

Tokens = tuple[list[int], list[float | None]]
"""Tokens that a reader returns for the first time, and their logprobs."""


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


def reply_limit(prompt_tokens: int, context_tokens: int, session_left: int | None = None) -> int:
    """Return the maximum length of a reply, in tokens. `session_left` is None without a cap on the session's tokens.

    Raises:
        ApiError: status 400; `context_length_exceeded` if the prompt fills the context, or
            `session_tokens_exceeded` if the session has reached its cap.
    """
    left = context_tokens - prompt_tokens
    if left < 1:
        raise context_exceeded(context_tokens, f"the messages alone are {prompt_tokens}")
    if session_left is None:
        return left
    if session_left < 1:
        raise ApiError(
            400,
            "this session has reached its limit of sampled tokens (gateway.session_tokens): end the rollout",
            code="session_tokens_exceeded",
        )
    return min(left, session_left)


def engine_params(
    call: ModelCall,
    sampling: Sampling,
    allowed: Collection[str],
    limit: int,
    stop_token_ids: Sequence[int],
    seed: int | None = None,
    choice: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Return the sampling parameters of one choice, and the names of the agent's ignored settings.

    `limit` is the maximum length of the reply, from `reply_limit`. `seed` is its seed, from `reply_seed`. An agent's
    own seed is only increased by the choice's index.
    """
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING} | {"seed": seed}
    overridden = []
    for name, asked in call.sampling.items():
        if name not in _SAMPLING:
            if asked:
                overridden.append(name)
        elif name in allowed:
            values[name] = asked + choice if name == "seed" else asked
        elif asked != getattr(sampling, name):
            overridden.append(name)
    params: dict[str, Any] = {
        "temperature": values["temperature"],
        "top_p": values["top_p"],
        "top_k": values["top_k"] or -1,
        "max_new_tokens": min(each for each in (call.max_new_tokens, sampling.max_tokens, limit) if each),
        "stop_token_ids": list(stop_token_ids),
    }
    if values["seed"] is not None:
        params["sampling_seed"] = values["seed"]
    return params, overridden


def reply_seed(seed: int | None, step: int, rollout_id: str, turn: int) -> int | None:
    """Derive the seed of a rollout's reply number `turn` (from 1) from the trainer's seed of the run.

    With the trainer's own seed, all rollouts of a group would be identical. A retried attempt gets the same seeds.
    """
    return None if seed is None else zlib.crc32(f"{seed}/{step}/{planned_id(rollout_id)}/{turn}".encode())


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


def aligned(given: Sequence[Sequence[Any]], ids: Sequence[int]) -> list[float | None]:
    """Return one logprob for each id, from pairs of both: None if it is of another, all None if one is missing."""
    if len(given) < len(ids):
        return [None] * len(ids)
    return [
        float(logprob)
        if token == wanted and isinstance(logprob, (int, float)) and _MISSING_LOGPROB < logprob < 1
        else None
        for (logprob, token, *_), wanted in zip(given, ids, strict=False)
    ]


def covering(listed: Sequence[Mapping[str, Any]], n: int) -> list[Span] | None:
    """Return the spans that an engine listed if they cover `n` tokens in order, else None."""
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in listed]
    at = 0
    for _, start, end in spans:
        if start != at or end < at:
            return None
        at = end
    return spans if at == n else None
