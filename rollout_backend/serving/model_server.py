"""Find out whether a server can serve agents in training, and which model it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rollout_backend.errors import PreflightError
from rollout_backend.serving.engine import PROBE

_TIMEOUT_S = 30.0  # the first generation of a server may compile kernels
_NEEDS = (
    "Rollouts need the ids and logprobs of sampled tokens, which /generate of an SGLang server returns. Servers that "
    "only speak OpenAI's API (vLLM, Ollama, a hosted model) do not return them"
)


async def served_model(url: str) -> str:
    """Return the model of an SGLang server, as it was named or placed when the server started.

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
            raise PreflightError(f"{url}{PROBE} answers {status}: this is no SGLang server. {_NEEDS}")
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
        }
        status, answer = await _ask(http, f"{url}/generate", body)
    if status != 200 or not (answer.get("meta_info") or {}).get("output_token_logprobs"):
        raise PreflightError(f"{url}/generate answers {status} without the logprob of a sampled token. {_NEEDS}")
    return str(info["model_path"])


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
