"""How one reply is sampled: SGLang's parameters out of the trainer's settings and the agent's wishes. Pure.

What must always hold: the trainer's sampling wins. Of the agent's own settings only those in `may_set` count;
`max_tokens` and `stop` count always, for they end a reply and do not change how its tokens are drawn. The rest is
counted as overridden.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import Sampling
from rollout_backend.gateway.call import ModelCall
from rollout_backend.gateway.errors import ApiError

_FIELDS = ("temperature", "top_p", "top_k", "seed")


@dataclass(frozen=True)
class Budget:
    """How many tokens there are room for, at this moment. `session_left` is None without a cap."""

    prompt_tokens: int
    context_length: int
    session_left: int | None = None

    def left(self) -> int:
        """Tokens that a reply may have.

        Raises:
            ApiError: status 400: `context_length_exceeded` where the prompt leaves no room for one token,
                `session_tokens_exceeded` where the session has sampled all that it may.
        """
        left = self.context_length - self.prompt_tokens
        if left < 1:
            raise context_exceeded(
                f"this model's context has {self.context_length} tokens, and the messages alone are "
                f"{self.prompt_tokens}"
            )
        if self.session_left is None:
            return left
        if self.session_left < 1:
            raise ApiError(
                400,
                "this session has sampled as many tokens as it may (gateway.session_tokens): end the rollout",
                code="session_tokens_exceeded",
            )
        return min(left, self.session_left)


@dataclass(frozen=True)
class EngineParams:
    """SGLang's sampling parameters, and the agent's settings that did not count."""

    params: dict[str, Any]
    overridden: list[str] = field(default_factory=list)


def engine_params(
    call: ModelCall,
    sampling: Sampling,
    may_set: Collection[str],
    budget: Budget,
    stop_token_ids: Sequence[int],
    seed_salt: str = "",
    choice: int = 0,
) -> EngineParams:
    """How one choice of this call is sampled.

    The trainer's seed is mixed with `seed_salt`, which differs between calls and choices: with the bare seed all
    rollouts of a group would be the same one. An agent's own seed is used as it is, plus the choice's number.

    Raises:
        ApiError: status 400; there is no room for one token (see `Budget`).
    """
    left = budget.left()
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _FIELDS}
    if sampling.seed is not None:
        values["seed"] = zlib.crc32(f"{sampling.seed}/{seed_salt}".encode())
    overridden = []
    for name, asked in call.wishes.items():
        if name not in _FIELDS:
            if asked:
                overridden.append(name)
        elif name in may_set:
            values[name] = asked + choice if name == "seed" else asked
        elif asked != getattr(sampling, name):
            overridden.append(name)
    params: dict[str, Any] = {
        "temperature": values["temperature"],
        "top_p": values["top_p"],
        "top_k": values["top_k"] or -1,
        "max_new_tokens": min(limit for limit in (call.max_new_tokens, sampling.max_tokens, left) if limit),
        "stop_token_ids": list(stop_token_ids),
    }
    if values["seed"] is not None:
        params["sampling_seed"] = values["seed"]
    if call.stop:
        params["stop"] = list(call.stop)
    return EngineParams(params, overridden)


def context_exceeded(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param="messages")
