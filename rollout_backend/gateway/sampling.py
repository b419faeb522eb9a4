"""Build SGLang's sampling parameters from the trainer's settings and the agent's request. Pure.

Invariants:

- The trainer's sampling has precedence. The agent's settings apply only if `allowed` names them; the others are
  counted as overridden.
- The agent's `max_tokens` always applies, because it ends a reply without changing the distribution of its tokens.

Stop strings are handled by `stop_strings`, not by engines.
"""

import zlib
from collections.abc import Collection, Sequence
from typing import Any

from agent_wrapper.contract import Sampling
from rollout_backend.core.api_error import ApiError, context_exceeded
from rollout_backend.core.model_call import ModelCall
from rollout_backend.core.tasks import planned_id

_FIELDS = ("temperature", "top_p", "top_k", "seed")


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
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _FIELDS} | {"seed": seed}
    overridden = []
    for name, asked in call.sampling.items():
        if name not in _FIELDS:
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
