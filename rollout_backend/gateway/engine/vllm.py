"""Speak vLLM's `/inference/v1/generate`, with token ids in and out (0.32.0, and 0.24.0, which verl 0.9.1 pins).

vLLM ignores unknown fields of the body and of the sampling parameters: with `max_new_tokens` it would sample to the
end of the context. Each parameter is therefore translated by name; one without a translation is an error.

Invariants:

- Logprobs describe the sampling distribution only if the server runs with `--logprobs-mode processed_logprobs`.
- vLLM sends -9999.0 for a logprob that is missing or minus infinity; the reader treats it as missing.
- The request includes stop strings, so that the engine ends the reply itself and its last chunk has the weight
  versions. The gateway still decides where the reply ends.
- 0.24.0 reports no weight version. In verl's servers `rollout_backend.verl.vllm_middleware` adds it as
  `weight_version`, before the first tokens of a stream.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rollout_backend.gateway.engine.protocol import STREAM_INTERVAL, EngineRequest, Span, Tokens, aligned, covering

_ID_PREFIX = "token_id:"  # prefix of the tokens in 0.24.0's logprobs


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
    """See `EngineProtocol`."""

    path = "/inference/v1/generate"
    abort_path: str | None = None  # it aborts when the connection closes
    needs_direct_calls = True  # sglang-router and smg answer this path with 404
    keepalive_s = 3.0  # the server closes idle connections after 5 s

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
            params["stream_interval"] = STREAM_INTERVAL  # 0.24.0 ignores it
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def reader(self, request: EngineRequest) -> VllmReader:
        return VllmReader()


class VllmReader:
    """See `ReplyReader`."""

    def __init__(self) -> None:
        self.finish: Mapping[str, Any] | None = None
        self.cached_tokens: int | None = None
        self.received = 0
        self._versions: list[Mapping[str, Any]] | None = None
        self._version: str | None = None  # of all tokens

    def read(self, reply: Mapping[str, Any]) -> Tokens:
        usage = reply.get("usage") or {}
        if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
            self.cached_tokens = cached
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
