"""Send calls that the router would truncate or not forward directly to an engine.

A router re-encodes the body of `/generate` with the fields it knows. sglang-router 0.3.2 and smg 1.13.0 drop
`structural_tag` and `logit_bias`; sglang-router also drops `return_prompt_token_ids` and `return_routed_experts`. A
call that needs one of them bypasses the router, and so does every call to vLLM: both answer its token endpoint with
404.

Invariants:

- All direct calls of a session go to one engine as long as the router lists it, so its prefix cache is used.
- If no engine is known, the call goes to the router.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from rollout_backend.gateway.generation_gate import GenerationGate

_DROPPED = frozenset({"structural_tag", "logit_bias"})


class DirectRouting:
    """Selects an engine of one router, for every call if `all_calls`. `EngineLoadPoller` updates `urls`; `gate`
    pauses calls to all engines."""

    def __init__(self, gate: GenerationGate | None = None, all_calls: bool = False) -> None:
        self.urls: Collection[str] = ()
        self.gate = gate or GenerationGate()
        self._all_calls = all_calls

    def for_call(self, params: Mapping[str, Any], routing_key: str, failed: Collection[str] = ()) -> str | None:
        """Return the engine for a call with these sampling parameters, or None to use the router.

        Engines in `failed` are used only if all engines are in it.
        """
        if not (self._all_calls or _DROPPED & params.keys()):
            return None
        ranked = sorted(self.urls, key=lambda url: hashlib.blake2b(f"{routing_key} {url}".encode()).digest())
        return next((url for url in ranked if url not in failed), ranked[0] if ranked else None)
