"""The engines behind the router, for calls that it would not pass on whole.

sglang-router takes the body of `/generate` apart and writes it anew with the fields it knows: 0.3.2 drops
`structural_tag`, `logit_bias` and `return_prompt_token_ids`. A call that needs one of them goes to an engine itself.
What must always hold: the calls of a session go to one engine while the router lists it, so that the conversation
stays cached there; and where no engine is known, to the router as all others do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

_DROPPED = frozenset({"structural_tag", "logit_bias"})


class Engines:
    """Of one router. `urls` is kept up to date by who polls it."""

    def __init__(self) -> None:
        self.urls: Collection[str] = ()

    def for_call(self, params: Mapping[str, Any], routing_key: str, failed: Collection[str] = ()) -> str | None:
        """The engine that a call with these sampling parameters goes to, passing over those that `failed` unless all
        have; None: to the router."""
        if not _DROPPED & params.keys():
            return None
        ranked = sorted(self.urls, key=lambda url: hashlib.blake2b(f"{routing_key} {url}".encode()).digest())
        return next((url for url in ranked if url not in failed), ranked[0] if ranked else None)
