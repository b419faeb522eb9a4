"""vLLM's HTTP interface with scripted answers, as strict and as lenient as vLLM itself (0.32.0).

- It ignores unknown fields with 200: without `max_tokens` the answer is not limited.
- It answers 404 to a request that names an unknown model, and samples from the base model if a request names none.
- `logprobs` must be asked for. A logprob that is missing is -9999.0.
- An aborted stream may end without a `finish_reason`, as one in four of 0.24.0 does.
- `/health` is 200 while generation is paused. A call that arrives meanwhile waits.
- Token ids are refused with 403 unless the server was started with --enable-scale-out.
- It closes connections that were idle for 5 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_backend.workbench.local.scripted import BYTE_MODEL, LOGPROB, Script, ScriptedEngine, event

_SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed", "logprobs", "logit_bias"),
        *("structured_outputs", "stream_interval", "detokenize"),
    }
)
_MISSING_LOGPROB = -9999.0
_NO_LIMIT = 1 << 20
_BASE = "scripted"
_ERRORS = {403: "Forbidden", 404: "NotFoundError"}


class ScriptedVllm(ScriptedEngine):
    """A `ScriptedEngine` that speaks vLLM's protocol.

    The logprob of a token at one of the positions `missing_logprobs` is missing. With `aborted_after`, each stream is
    aborted after that number of tokens until it has been set to None; `says_abort` is whether it says so.
    `old_format` writes token ids and versions as 0.24.0 does. `adapters` holds the LoRA adapters that requests may
    name as their model, and `sampled_with` the adapter that each request named, or "" for the base model.
    """

    def __init__(
        self,
        replies: Script,
        model_path: Path = BYTE_MODEL,
        port: int = 0,
        *,
        scale_out: bool = True,
        raw_logprobs: bool = False,
        old_format: bool = False,
        **more: Any,
    ) -> None:
        self.missing_logprobs: frozenset[int] = frozenset()
        self.aborted_after: int | None = None
        self.says_abort = True
        self.cached_tokens = 0
        self.ignored: list[str] = []  # fields that vLLM does not know
        self.adapters: dict[str, Any] = {}
        self.sampled_with: list[str] = []
        self._scale_out = scale_out
        self._raw_logprobs = raw_logprobs
        self._old_format = old_format
        self.paused = False
        super().__init__(replies, model_path, port, **more)

    def _routes(self) -> list[Route]:
        async def healthy(_: Request) -> Response:
            return Response()

        async def models(_: Request) -> Response:
            base = [{"id": _BASE, "root": str(self._model_path)}]
            adapters = [{"id": name, "parent": _BASE} for name in self.adapters]
            return JSONResponse({"object": "list", "data": [*base, *adapters]})

        async def version(_: Request) -> Response:
            return JSONResponse({"version": "0.24.0" if self._old_format else "0.32.0"})

        async def pause(request: Request) -> Response:
            self.paused = request.url.path == "/pause"
            return JSONResponse({"status": "paused" if self.paused else "resumed"})

        return [
            Route("/health", healthy, methods=["GET"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            *(Route(path, pause, methods=["POST"]) for path in ("/pause", "/resume")),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
        ]

    async def _generate(self, request: Request) -> Response:
        if not self._scale_out:
            message = "Endpoint disabled. Launch with --enable-scale-out to enable the scale-out endpoints."
            return _error(403, message)
        named = (await request.json()).get("model") or _BASE
        if named != _BASE and named not in self.adapters:
            return _error(404, f"The model `{named}` does not exist.")
        self.sampled_with.append("" if named == _BASE else named)
        while self.paused:  # noqa: ASYNC110  # as the scheduler does
            await asyncio.sleep(0.01)
        return await super()._generate(request)

    async def _translated(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request in SGLang's form. Raise ValueError if vLLM refuses it."""
        params = body.get("sampling_params", {})
        self.ignored += [name for name in params if name not in _SAMPLING]
        if params.get("stop") and params.get("detokenize") is False:
            raise ValueError("stop strings are only supported when detokenize is True.")
        if not body.get("token_ids"):
            raise ValueError("token_ids: List should have at least 1 item after validation")
        translated = {"max_new_tokens": params.get("max_tokens", _NO_LIMIT)}
        translated |= {name: params[name] for name in ("stop", "stop_token_ids") if name in params}
        return {**body, "input_ids": body["token_ids"], "sampling_params": translated, "vllm_params": params}

    def _whole(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        whole = self._completion(text, body)
        return {"usage": self._usage(body), "choices": [self._choice(whole, body, 0, len(whole["output_ids"]))]}

    async def _events(self, parts: Iterable[str], body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield a piece for each token, then the usage."""
        whole = self._completion("".join(await asyncio.to_thread(list, parts)), body)
        total, cut = len(whole["output_ids"]), self.aborted_after
        done = False
        try:
            for n in range(total):
                if n == cut:
                    if self.says_abort:
                        piece = self._choice(whole, body, n, n)
                        yield event({"choices": [{**piece, "finish_reason": "abort", **self._versions(n)}]})
                    break
                yield event({"choices": [self._choice(whole, body, n, n + 1)]})
            done = True
            if (body.get("stream_options") or {}).get("include_usage"):
                yield event({"usage": self._usage(body), "choices": []})
            yield b"data: [DONE]\n\n"
        finally:
            self.aborted += not done

    def _choice(self, whole: dict[str, Any], body: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        ids, finish = whole["output_ids"], whole["meta_info"]["finish_reason"]
        last = end == len(ids)
        matched = finish.get("matched")
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids[start:end],
            "finish_reason": finish["type"] if last else None,
            "logprobs": None,
            "routed_experts": None,
        }
        if not self._old_format:
            choice["stop_reason"] = matched if last and isinstance(matched, str) else None
            choice |= self._versions(len(ids)) if last else {"weight_versions": None}
        params = body["vllm_params"]
        if params.get("logprobs") is not None:
            choice["logprobs"] = {"content": [self._entry(n, ids[n], params) for n in range(start, end)]}
        return choice

    def _entry(self, n: int, token: int, params: dict[str, Any]) -> dict[str, Any]:
        forced = params.get("top_k") == 1 and not self._raw_logprobs
        logprob = _MISSING_LOGPROB if n in self.missing_logprobs else 0.0 if forced else LOGPROB
        if self._old_format:
            return {"token": f"token_id:{token}", "logprob": logprob}
        return {"token_id": token, "logprob": logprob, "rank": 1}

    def _versions(self, n: int) -> dict[str, Any]:
        if self._old_format:
            return {}
        return {"weight_versions": [{"version": self.weight_version, "start": 0, "end": n}]}

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt_tokens": len(body["input_ids"]),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": _ERRORS[status], "code": status}}, status_code=status)
