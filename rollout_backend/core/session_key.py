"""Session keys: signed claims about what one session may do, and until when.

A key contains its claims, so no registration is needed before a dispatch, and every process that knows the secret can
verify a key. Holders of a key can read its claims but cannot alter them. Keys and secrets never appear in logs or
messages. `serving.run_secret` issues keys, `gateway.authentication` checks them.
"""

import hashlib
from typing import Literal

from pydantic import BaseModel, Field

from agent_wrapper.contract import Identifier, Sampling
from rollout_backend.core import signed_claims
from rollout_backend.errors import RolloutBackendError

MIN_SECRET_CHARS = 32


class SessionClaims(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The claims of a key. `expires_at` is in unix seconds. `journal_id` names the journal that holds the session,
    and `trainer_incarnation` the trainer's process in which it began. Sessions with the same `routing_key` share an
    engine; an empty key stands for the session itself. Model calls sample with the LoRA adapter `adapter`, or without
    one if it is empty. Unless `is_recorded`, each call is a separate session that is forgotten with its answer."""

    run_id: Identifier
    step: int = Field(ge=0)
    rollout_id: Identifier
    attempt: int = Field(ge=1)
    session_id: str = Field(min_length=1, max_length=256)
    sampling: Sampling
    expires_at: float
    journal_id: str = ""
    trainer_incarnation: str = ""
    routing_key: str = ""
    adapter: str = ""
    is_recorded: bool = True


class KeyRefused(RolloutBackendError):
    """An unusable key: `malformed`, `bad_signature` or `expired`."""

    def __init__(self, reason: Literal["malformed", "bad_signature", "expired"]) -> None:
        super().__init__(f"the session key is refused: {reason}")
        self.reason = reason


def issue(secret: str, claims: SessionClaims) -> str:
    """Sign a key for these claims."""
    return signed_claims.sign(secret.encode(), claims)


def verify(secret: str, key: str, now: float, previous_secret: str | None = None) -> SessionClaims:
    """Return the claims of a key that was signed with this secret or the previous one and is valid at `now` (unix
    seconds).

    Raises:
        KeyRefused: the key is not valid; says why.
    """
    try:
        keys = [each.encode() for each in (secret, previous_secret) if each is not None]
        claims = signed_claims.verify(keys, key, SessionClaims)
    except signed_claims.BadSignature:
        raise KeyRefused("bad_signature") from None
    except signed_claims.Malformed:
        raise KeyRefused("malformed") from None
    if claims.expires_at <= now:
        raise KeyRefused("expired")
    return claims


def shard_of(session_id: str, shards: int) -> int:
    """Return the index of the gateway to which a session belongs, from 0."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards
