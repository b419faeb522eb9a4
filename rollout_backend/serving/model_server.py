"""Find out whether a server can serve agents in training, and which model it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp

from rollout_backend.config import EngineName
from rollout_backend.errors import PreflightError
from rollout_backend.serving.engine import PROBE

_TIMEOUT_S = 30.0  # the first generation of a server may compile kernels
_NEEDS = (
    "Rollouts need the ids and logprobs of sampled tokens, which SGLang and vLLM return. Servers that only speak "
    "OpenAI's API (Ollama, a hosted model) do not return them"
)
_VLLM_PATH = "/inference/v1/generate"


class ServedModel(NamedTuple):
    path: str
    """The model, as it was named or placed when the server started."""
    engine: EngineName


async def served_model(url: str) -> ServedModel:
    """Return the model of an SGLang or vLLM server.

    Raises:
        PreflightError: the server cannot be used, and why.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        status, info = await _ask(http, url + PROBE)
        if status != 200 or not info.get("model_path"):
            if (await _ask(http, f"{url}/get_model_info"))[0] == 200:
                raise PreflightError(
                    f"{url} answers /get_model_info and not {PROBE}: it is a router, or an old SGLang. Name an "
                    "SGLang server; the run starts its own router"
                )
            models = (await _ask(http, f"{url}/v1/models"))[1].get("data") or [{}]
            if (await _ask(http, f"{url}/version"))[1].get("version") and models[0].get("root"):
                await check_vllm(url)
                return ServedModel(str(models[0]["root"]), "vllm")
            raise PreflightError(f"{url}{PROBE} answers {status}: this is no SGLang or vLLM server. {_NEEDS}")
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
        }
        status, answer = await _ask(http, f"{url}/generate", body)
    if status != 200 or not (answer.get("meta_info") or {}).get("output_token_logprobs"):
        raise PreflightError(f"{url}/generate answers {status} without the logprob of a sampled token. {_NEEDS}")
    return ServedModel(str(info["model_path"]), "sglang")


async def check_vllm(url: str) -> None:
    """Check that a vLLM server returns token ids, and logprobs of the distribution that it samples from.

    With `top_k=1` one token is left, whose logprob is 0 then. Before top_k it is below. A server of verl may be
    asleep and would answer later, so its middleware is asked instead.

    Raises:
        PreflightError: the server cannot be used, and why.
    """
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        mode = (await _ask(http, url + PROBE))[1].get("logprobs_mode")
        if mode is None:
            status, answer = await _ask(http, url + _VLLM_PATH, {"token_ids": [0], "sampling_params": params})
    if mode == "processed_logprobs":
        return
    if mode is not None:
        raise PreflightError(
            f"{url} returns logprobs of another distribution than it samples from: set "
            f"actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, not {mode}"
        )
    if status in (403, 404):
        raise PreflightError(f"{url}{_VLLM_PATH} answers {status}: start vLLM 0.32.0 with --enable-scale-out")
    try:
        [entry] = answer["choices"][0]["logprobs"]["content"]
        logprob = float(entry["logprob"])
    except (LookupError, TypeError, ValueError):
        raise PreflightError(f"{url}{_VLLM_PATH} answers {status} without the logprob of a sampled token") from None
    if logprob != 0:
        raise PreflightError(
            f"{url} returns logprobs of another distribution than it samples from: start vLLM with --logprobs-mode "
            "processed_logprobs"
        )


async def check_records_experts(url: str) -> None:
    """Check that an SGLang server returns routed experts. Generates nothing: its memory may be released.

    Raises:
        PreflightError: it does not, or returns wrong ones.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        status, info = await _ask(http, f"{url}/server_info")
    if not info.get("enable_return_routed_experts"):
        raise PreflightError(
            f"model.routed_experts=true: {url}/server_info answers {status} without enable_return_routed_experts: "
            "start SGLang with --enable-return-routed-experts; in verl, set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    if info.get("enable_hierarchical_cache"):
        raise PreflightError(
            f"model.routed_experts=true, and {url} runs with --enable-hierarchical-cache: tokens that come back from "
            "that cache get the routing of others, so start it without"
        )


async def check_reads_seeds(url: str) -> None:
    """Raise PreflightError if an SGLang server ignores the seeds of requests."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        status, info = await _ask(http, f"{url}/server_info")
    if not info.get("enable_deterministic_inference"):
        raise PreflightError(
            f"sampling.seed is set, and {url}/server_info answers {status} without enable_deterministic_inference: "
            "SGLang ignores seeds then. Start it with --enable-deterministic-inference, in verl by "
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=True, or remove the seed"
        )


async def _ask(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON object of an answer. Raises PreflightError."""
    try:
        async with http.request("GET" if body is None else "POST", url, json=body) as reply:
            try:
                answer = json.loads(await reply.read())
            except ValueError:
                answer = None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise PreflightError(f"no server answers at {url} ({error or type(error).__name__})") from None
    return reply.status, answer if isinstance(answer, dict) else {}
