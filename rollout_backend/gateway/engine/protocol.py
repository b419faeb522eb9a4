"""Define requests to engines: their sampling parameters, and the protocol that writes them and reads the replies.

SGLang's `/generate` is here, because requests have its sampling parameters; `vllm` translates them.

Invariants:

- The trainer's sampling has precedence. The agent's settings apply only if `agent_sampling_overrides` names them; the
  others are counted as overridden.
- The agent's `max_tokens` always applies, because it ends a reply without changing the distribution of its tokens.
- A reader returns each token once, with the logprob that the engine gives for it. A missing logprob is None.
- Spans of weight versions cover all tokens of a reply in order, or are missing altogether.
"""

from __future__ import annotations

import base64
import math
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent_wrapper.contract import Sampling
from rollout_backend.config import ExpertShape, RouterKind
from rollout_backend.core.images import PlacedImage, collapse_images
from rollout_backend.core.model_call import ApiError, ModelCall, context_exceeded
from rollout_backend.core.routed_experts import pack
from rollout_backend.core.tasks import planned_id
from rollout_backend.errors import ServingError
from rollout_backend.rendering.token_bytes import StopStrings

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_IMAGES_STREAM_INTERVAL = 32  # each chunk of SGLang repeats the prompt, so images need longer ones

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
        raise context_exceeded(
            f"this model's context has {context_tokens} tokens, and the messages alone are {prompt_tokens}"
        )
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


# --- SGLang -----------------------------------------------------------------------------------------------------


class SglangProtocol:
    """See `EngineProtocol`."""

    path = "/generate"
    abort_path: str | None = "/abort_request"
    keepalive_s = 15.0

    def __init__(self, experts: ExpertShape | None = None, router: RouterKind = "sglang-router") -> None:
        """`experts` is the shape of the model's routing if it is recorded, otherwise None."""
        self._experts = experts
        self.needs_direct_calls = experts is not None and router == "sglang-router"  # it drops the field

    def body(self, request: EngineRequest) -> dict[str, Any]:
        images, params = request.images, request.params
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": np.asarray(collapse_images(request.prompt, images), dtype=np.int32),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # 0 would disable the prefix cache
        }
        if images:
            body |= {"image_data": [placed.image.data_url for placed in images], "return_prompt_token_ids": True}
        if request.adapter:
            body["lora_path"] = request.adapter
        if request.experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
        if request.stream:
            interval = _IMAGES_STREAM_INTERVAL if images else STREAM_INTERVAL
            body |= {"stream": True, "sampling_params": {**params, "stream_interval": interval}}
        return body

    def reader(self, request: EngineRequest) -> SglangReader:
        return SglangReader(request, self._experts)


class SglangReader:
    """See `ReplyReader`. For a request with images, compares the prompt in the reply with the recorded one."""

    def __init__(self, request: EngineRequest, experts: ExpertShape | None = None) -> None:
        self.finish: Mapping[str, Any] | None = None
        self.received = 0
        self._prompt = list(request.prompt) if request.images else None
        self._prompt_tokens, self._experts_from = len(request.prompt), request.experts_from
        self._experts = experts
        self._meta: Mapping[str, Any] = {}
        self._current: set[Any] = set()  # the engine's weight version in each chunk

    def read(self, reply: Mapping[str, Any]) -> Tokens:
        """Return the new tokens of a whole reply, or of the next chunk.

        Depending on the engine's settings, a chunk has all tokens of the reply or only those since the last chunk.
        `completion_tokens` distinguishes the two.
        """
        if self._prompt is not None:
            _check_prompt(reply, self._prompt)
        ids = [int(token) for token in reply["output_ids"]]
        meta = reply["meta_info"]
        logprobs = meta.get("output_token_logprobs") or []
        had = self.received
        total = meta.get("completion_tokens", len(ids))
        if len(ids) == total:
            ids, logprobs = ids[had:], logprobs[had:]
        else:
            ids = ids[: max(0, total - had)]  # an abort repeats the last token
        self.received += len(ids)
        self._meta = meta
        self._current.add(meta.get("weight_version"))
        self.finish = meta["finish_reason"]
        return ids, _logprobs(logprobs, ids)

    @property
    def cached_tokens(self) -> int | None:
        cached = self._meta.get("cached_tokens")
        return None if cached is None else int(cached)

    def experts(self) -> NDArray[np.uint8] | None:
        """See `ReplyReader`. Only the last chunk of a stream has them. An SGLang version that does not know
        `routed_experts_start_len` returns those of all tokens."""
        start, encoded = self._experts_from, self._meta.get("routed_experts")
        if start is None or self._experts is None or encoded is None or not self.received:
            return None
        rows = pack(np.frombuffer(base64.b64decode(encoded), dtype="<i4"), self._experts)
        wanted = self._prompt_tokens + self.received - 1 - start
        if len(rows) == start + wanted:
            rows = rows[start:]
        return rows if len(rows) == wanted else None

    def spans(self) -> list[Span] | None:
        if self.received == 0:
            return []
        if listed := self._meta.get("weight_versions"):
            return covering(listed, self.received)
        if len(self._current) > 1:
            return None  # an interrupted stream during which the weights changed
        version = self._meta.get("weight_version")
        return None if version is None else [(str(version), 0, self.received)]


def _check_prompt(reply: Mapping[str, Any], prompt: Sequence[int]) -> None:
    if not reply["output_ids"]:
        return  # aborted, perhaps before the prompt was built
    saw = reply.get("prompt_token_ids")  # absent behind sglang-router, which drops the request for them
    length = len(saw) if saw is not None else reply["meta_info"].get("prompt_tokens")
    if length is None:
        raise PromptDiffers("the engine does not report the length of the prompt that it built from the images")
    if length != len(prompt) or saw not in (None, prompt):
        raise PromptDiffers(
            f"the engine built a prompt of {length} tokens from the images, and the recorded one has {len(prompt)}"
        )


def _logprobs(given: Sequence[Any], ids: list[int]) -> list[float | None]:
    """Return one logprob for each id; None if it is missing or belongs to another token."""
    found = [finite(entry[0]) if entry[1] == token else None for entry, token in zip(given, ids, strict=False)]
    return found + [None] * (len(ids) - len(found))
