"""Assign each session to one gateway of a run, by a hash of its id."""

from __future__ import annotations

import hashlib

from rollout_backend.core.api_error import ApiError


def shard_of(session_id: str, shards: int) -> int:
    """Return the number of the shard that a session belongs to, from 0."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def check_shard(session_id: str, shard: int, shards: int) -> None:
    """Raise ApiError (421), which names the right shard, if the session does not belong to `shard`."""
    owner = shard_of(session_id, shards)
    if owner != shard:
        raise ApiError(
            421,
            f"this is gateway {shard} of {shards}, and the session belongs to gateway {owner} of {shards}: use the "
            "base_url of this rollout's request as it is",
            code="wrong_shard",
        )
