"""Define requests to engines, their sampling parameters, and the protocols that write them and read the replies.

Token ids go in and out. Requests have SGLang's sampling parameters, which `VllmProtocol` translates.

Invariants:

- The trainer's sampling has precedence. The agent's settings apply only if `agent_sampling_overrides` names them; the
  others are counted as overridden.
- The agent's `max_tokens` always applies, because it ends a reply without changing the distribution of its tokens.
- A reader returns each token once, with the logprob that the engine gives for it. A missing logprob is None.
- Spans of weight versions cover all tokens of a reply in order, or are missing altogether.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent_wrapper.contract import Sampling
from rollout_backend.base.names import random_name
from rollout_backend.config import ExpertShape, RouterKind
from rollout_backend.core.routed_experts import pack
from rollout_backend.core.tasks import planned_id
from rollout_backend.errors import ServingError
from rollout_backend.model.images import PlacedImage, collapse_images
from rollout_backend.model.model_call import ApiError, ModelCall, context_exceeded
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.rendering.token_bytes import StopStrings

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
# vLLM sends this for a missing logprob, and also for minus infinity.
_MISSING_LOGPROB = -9999.0

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
    cancelled: Callable[[Completion], None] | None = None
    """Gets what was sampled, without routing, if the call is cancelled."""
    resumable: bool = True
    """Whether an aborted generation may continue from the tokens sampled so far. A grammar cannot resume."""
    experts_from: int | None = None
    """Index of the first token whose routing is wanted (mixture of experts); None if no routing is wanted."""
    adapter: str = ""
    """The LoRA adapter to sample with; `body` needs the engine's name for it. Empty for the base model."""
    deadline: float = math.inf
    """Time of the event loop at which the call ends, if that is before the client's own limit."""

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
    counters_path: str
    """Path of the page with the engine's counters of work."""

    def counters(self, page: bytes) -> Any:
        """Return counters that change while the engine samples, and only then; None if the page has none.

        Raises:
            LookupError, TypeError, ValueError: the page is malformed.
        """
        ...

    def body(self, request: EngineRequest) -> dict[str, Any]: ...

    def reader(self, request: EngineRequest) -> ReplyReader: ...


def aligned(given: Sequence[Sequence[Any]], ids: Sequence[int]) -> list[float | None]:
    """Return the logprob of each id. `given` are pairs of a logprob and its id.

    A logprob of another id is None. All are None if there are fewer pairs than ids.
    """
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


# --- SGLang --------------------------------------------------------------------------------------------------------

# Each chunk repeats the prompt, so images need longer chunks.
_IMAGES_STREAM_INTERVAL = 32


class SglangProtocol:
    """SGLang's `/generate`."""

    path = "/generate"
    abort_path: str | None = "/abort_request"
    keepalive_s = 15.0
    # The scheduler answers this request, so a hung scheduler does not.
    counters_path = "/v1/loads?include=core"

    def __init__(self, experts: ExpertShape | None = None, router: RouterKind = "sglang-router") -> None:
        """`experts` is the shape of the model's routing if it is recorded, otherwise None."""
        self._experts = experts
        # sglang-router drops the field.
        self.needs_direct_calls = experts is not None and router == "sglang-router"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        images, params = request.images, request.params
        ids = collapse_images(request.prompt, images) if images else request.prompt
        body = {
            "rid": random_name(),
            "input_ids": np.asarray(ids, dtype=np.int32),
            "sampling_params": params,
            "return_logprob": True,
            # 0 would disable the prefix cache.
            "logprob_start_len": -1,
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

    def counters(self, page: bytes) -> Any:
        ranks = json.loads(page)["loads"]
        return [(rank["num_running_reqs"], rank["num_used_tokens"]) for rank in ranks]

    def reader(self, request: EngineRequest) -> SglangReader:
        return SglangReader(request, self._experts)


class SglangReader:
    """See `ReplyReader`. For a request with images, compares the prompt in the reply with the recorded one."""

    def __init__(self, request: EngineRequest, experts: ExpertShape | None = None) -> None:
        self.finish: Mapping[str, Any] | None = None
        self.received = 0
        self._prompt, self._images = list(request.prompt) if request.images else None, len(request.images)
        self._prompt_tokens, self._experts_from = len(request.prompt), request.experts_from
        self._experts = experts
        self._meta: Mapping[str, Any] = {}
        self._current: set[Any] = set()

    def read(self, reply: Mapping[str, Any]) -> Tokens:
        """Return the new tokens of a whole reply, or of the next chunk.

        Depending on the engine's settings, a chunk has the tokens and logprobs of the whole reply, or only those
        since the last chunk. `completion_tokens` distinguishes the two.
        """
        if self._prompt is not None:
            _check_prompt(reply, self._prompt, self._images)
        ids = [*map(operator.index, reply["output_ids"])]
        meta, had = reply["meta_info"], self.received
        finish, given = meta["finish_reason"], meta.get("output_token_logprobs") or []
        total = meta["completion_tokens"] if had else meta.get("completion_tokens", len(ids))
        ids = ids[had:] if len(ids) == total else ids
        # An aborted reply may repeat its last token.
        repeats = finish is not None and finish["type"] == "abort"
        if total < had or not 0 <= len(ids) - (total - had) <= repeats:
            raise ValueError(f"{len(ids)} tokens after {had}, and completion_tokens={total}")
        ids = ids[: total - had]
        logprobs = aligned(given[had:] if len(given) == total else given, ids)
        self.received = total
        self._meta = meta
        self._current.add(meta.get("weight_version"))
        self.finish = finish
        return ids, logprobs

    @property
    def cached_tokens(self) -> int | None:
        cached = self._meta.get("cached_tokens")
        return None if cached is None else int(cached)

    def experts(self) -> NDArray[np.uint8] | None:
        """Return the experts, which only the last chunk of a stream has: see `ReplyReader`.

        An SGLang version that does not know `routed_experts_start_len` returns those of all tokens.
        """
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
            # The weights changed during an interrupted stream.
            return None
        version = self._meta.get("weight_version")
        return None if version is None else [(str(version), 0, self.received)]


def _check_prompt(reply: Mapping[str, Any], prompt: Sequence[int], images: int) -> None:
    if not reply["output_ids"]:
        # The request was aborted, perhaps before the prompt was built.
        return
    # sglang-router drops the request for the ids, so they are absent behind it.
    saw = reply.get("prompt_token_ids")
    length = len(saw) if saw is not None else reply["meta_info"].get("prompt_tokens")
    if length is None:
        raise PromptDiffers("the engine does not report the length of the prompt that it built from the images")
    if saw is None and images > 1:
        raise PromptDiffers(
            f"the engine returned only the length of the prompt that it built from {images} images, which does not "
            "tell the tokens of each: use SGLang 0.5.23, or set gateway.max_images to 1"
        )
    if length != len(prompt) or saw not in (None, prompt):
        raise PromptDiffers(
            f"the engine built a prompt of {length} tokens from the images, and the recorded one has {len(prompt)}"
        )


# --- vLLM ----------------------------------------------------------------------------------------------------------

# vLLM 0.24.0 prefixes the tokens in its logprobs.
_ID_PREFIX = "token_id:"


def _same(value: Any) -> Any:
    return value


_PARAMETERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": ("temperature", _same),
    "top_p": ("top_p", _same),
    "top_k": ("top_k", _same),
    "max_new_tokens": ("max_tokens", _same),
    "stop_token_ids": ("stop_token_ids", _same),
    "sampling_seed": ("seed", _same),
    "logit_bias": ("logit_bias", _same),
    "json_schema": ("structured_outputs", lambda schema: {"json": json.loads(schema)}),
    "structural_tag": ("structured_outputs", lambda tag: {"structural_tag": tag}),
}
"""Each of SGLang's sampling parameters, with vLLM's name and the function that translates its value."""


class VllmProtocol:
    """vLLM's `/inference/v1/generate` (0.32.0, and 0.24.0, which verl 0.9.1 pins).

    vLLM ignores unknown fields of the body and of the sampling parameters: with `max_new_tokens` it would sample to
    the end of the context. Each parameter is therefore translated by name; one without a translation is an error.

    Invariants:

    - Logprobs describe the sampling distribution only if the server runs with `--logprobs-mode processed_logprobs`.
    - vLLM sends -9999.0 for a logprob that is missing or minus infinity; the reader treats it as missing.
    - The request includes stop strings, so that the engine ends the reply itself and its last chunk has the weight
      versions. The gateway still decides where the reply ends.
    - 0.24.0 reports no weight version. In verl's servers `rollout_backend.verl.vllm_middleware` adds it as
      `weight_version`, before the first tokens of a stream.
    """

    path = "/inference/v1/generate"
    # vLLM aborts a request when its connection closes.
    abort_path: str | None = None
    # sglang-router and smg answer this path with 404.
    needs_direct_calls = True
    # The server closes idle connections after 5 s.
    keepalive_s = 3.0
    counters_path = "/metrics"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        if request.images:
            raise ValueError("images are not supported with serving.engine=vllm")
        if request.experts_from is not None:
            raise ValueError("model.routed_experts is not supported with serving.engine=vllm")
        params: dict[str, Any] = {"logprobs": 0, "detokenize": request.stops is not None}
        for name, value in request.params.items():
            if name not in _PARAMETERS:
                raise ValueError(f"the sampling parameter {name} has no translation for vLLM")
            translated, convert = _PARAMETERS[name]
            params[translated] = convert(value)
        if request.stops is not None:
            params["stop"] = list(request.stops.strings)
        body = {"token_ids": np.asarray(request.prompt, dtype=np.int32), "sampling_params": params}
        if request.adapter:
            body["model"] = request.adapter
        if request.stream:
            # vLLM 0.24.0 ignores this.
            params["stream_interval"] = STREAM_INTERVAL
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def counters(self, page: bytes) -> Any:
        names = (b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total")
        return [line for line in page.splitlines() if line.startswith(names)] or None

    def reader(self, request: EngineRequest) -> VllmReader:
        return VllmReader()


class VllmReader:
    """See `ReplyReader`."""

    def __init__(self) -> None:
        self.finish: Mapping[str, Any] | None = None
        self.cached_tokens: int | None = None
        self.received = 0
        self._versions: list[Mapping[str, Any]] | None = None
        self._version: str | None = None

    def read(self, reply: Mapping[str, Any]) -> Tokens:
        usage = reply.get("usage") or {}
        if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
            self.cached_tokens = int(cached)
        # The last event of a stream has only the usage.
        [choice] = reply["choices"] or [{"token_ids": [], "finish_reason": None}]
        ids = [*map(operator.index, choice["token_ids"])]
        entries = (choice.get("logprobs") or {}).get("content") or []
        received = self.received + len(ids)
        if (counted := usage.get("completion_tokens")) not in (None, received):
            raise ValueError(f"{received} tokens, and the usage counts {counted}")
        logprobs = aligned([(entry["logprob"], _id_of(entry)) for entry in entries], ids)
        self.received = received
        self._versions = choice.get("weight_versions") or self._versions
        self._version = choice.get("weight_version") or self._version
        if (reason := choice["finish_reason"]) is not None:
            self.finish = {"type": reason}
        return ids, logprobs

    def experts(self) -> None:
        return None

    def spans(self) -> list[Span] | None:
        """Return the spans of the last chunk; None from 0.24.0 and after an interrupted stream."""
        if self.received == 0:
            return []
        if self._version is not None:
            return [(self._version, 0, self.received)]
        return None if self._versions is None else covering(self._versions, self.received)


def _id_of(entry: Mapping[str, Any]) -> int:
    token_id = entry.get("token_id")
    return int(token_id if token_id is not None else entry["token"].removeprefix(_ID_PREFIX))
