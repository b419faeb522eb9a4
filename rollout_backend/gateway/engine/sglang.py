"""Speak SGLang's `/generate`, with token ids in and out."""

from __future__ import annotations

import base64
import operator
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_backend.config import ExpertShape, RouterKind
from rollout_backend.core.images import collapse_images
from rollout_backend.core.routed_experts import pack
from rollout_backend.gateway.engine.protocol import (
    STREAM_INTERVAL,
    EngineRequest,
    PromptDiffers,
    Span,
    Tokens,
    aligned,
    covering,
)

_IMAGES_STREAM_INTERVAL = 32  # each chunk repeats the prompt, so images need longer ones


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

        Depending on the engine's settings, a chunk has all tokens of the reply or only those since the last chunk,
        and its logprobs likewise. `completion_tokens` distinguishes the two.
        """
        if self._prompt is not None:
            _check_prompt(reply, self._prompt)
        ids = [*map(operator.index, reply["output_ids"])]
        meta, had = reply["meta_info"], self.received
        finish, given = meta["finish_reason"], meta.get("output_token_logprobs") or []
        total = meta["completion_tokens"] if had else meta.get("completion_tokens", len(ids))
        ids = ids[had:] if len(ids) == total else ids
        repeats = finish is not None and finish["type"] == "abort"  # perhaps, its last token
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
