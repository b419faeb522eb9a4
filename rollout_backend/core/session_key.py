"""Sign claims, and session keys: signed claims about what one session may do, and until when.

Signed claims are readable and tamper-proof: their JSON and a signature (HMAC-SHA256), each in URL-safe base64. They
have no header, so an attacker cannot choose another algorithm, and take a third of the CPU time of a JWT.

A key contains its claims, so no registration is needed before a dispatch, and every process that knows the secret can
verify a key. Holders of a key can read its claims but cannot alter them. Keys and secrets never appear in logs or
messages. `serving.run_secret` issues keys, `gateway.access` checks them.
"""

import functools
import hashlib
import hmac
import zlib
from collections.abc import Iterable
from typing import Literal, TypeVar

from itsdangerous import BadData, Signer
from itsdangerous.encoding import base64_decode, base64_encode
from pydantic import BaseModel, Field, ValidationError

from agent_wrapper.contract import Identifier, Sampling
from rollout_backend.errors import RolloutBackendError

MIN_SECRET_CHARS = 32
_SEPARATOR = "."
_MAX_CLAIMS = 8192

_Claims = TypeVar("_Claims", bound=BaseModel)


class ClaimsRefused(ValueError):
    """The string contains no such claims, or is not signed with one of the keys."""

    def __init__(self, reason: Literal["malformed", "bad_signature"]) -> None:
        super().__init__(reason)
        self.reason = reason


@functools.lru_cache(maxsize=16)
def _signer(key: bytes) -> Signer:
    return Signer(key, sep=_SEPARATOR, key_derivation="none", digest_method=hashlib.sha256)


def sign_claims(key: bytes, claims: BaseModel) -> str:
    """Return these claims as a signed string."""
    return _signer(key).sign(base64_encode(claims.model_dump_json())).decode()


def verify_claims(keys: Iterable[bytes], text: str, kind: type[_Claims]) -> _Claims:
    """Return the claims of a string that was signed with one of these keys.

    Only the exact signed string is accepted, although base64 can encode the same bytes in several ways. Raises
    ClaimsRefused.
    """
    encoded, separator, _ = text.rpartition(_SEPARATOR)
    if not separator:
        raise ClaimsRefused("malformed")
    if not any(hmac.compare_digest(_signer(key).sign(encoded), text.encode()) for key in keys):
        raise ClaimsRefused("bad_signature")
    return read_claims(text, kind)


def read_claims(text: str, kind: type[_Claims]) -> _Claims:
    """Return the claims of a signed string without verifying its signature. Raises ClaimsRefused."""
    try:
        return kind.model_validate_json(base64_decode(text.rpartition(_SEPARATOR)[0]))
    except (BadData, ValidationError):
        raise ClaimsRefused("malformed") from None


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
    return sign_claims(secret.encode(), claims)


def verify(secret: str, key: str, now: float, previous_secret: str | None = None) -> SessionClaims:
    """Return the claims of a key that was signed with this secret or the previous one and is valid at `now` (unix
    seconds).

    Raises:
        KeyRefused: the key is not valid; says why.
    """
    try:
        keys = [each.encode() for each in (secret, previous_secret) if each is not None]
        claims = verify_claims(keys, key, SessionClaims)
    except ClaimsRefused as error:
        raise KeyRefused(error.reason) from None
    if claims.expires_at <= now:
        raise KeyRefused("expired")
    return claims


@functools.cache
def _common_claims() -> bytes:
    """Return claims as they often are. `shorten` encodes only the differences."""
    sampling = Sampling()
    claims = SessionClaims(
        run_id="r", step=1, rollout_id="r.0", attempt=1, session_id="rollout-", sampling=sampling, expires_at=1.8e9
    )
    return claims.model_dump_json().encode()


def shorten(key: str) -> str:
    """Return a key in less than half as many characters, for ids that may have 256. Only `expand` reads it."""
    claims, _, signature = key.rpartition(_SEPARATOR)
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=_common_claims())
    return f"{base64_encode(packer.compress(base64_decode(claims)) + packer.flush()).decode()}{_SEPARATOR}{signature}"


def expand(text: str) -> str:
    """Return the key from which `shorten` made this string. Other strings are returned unchanged."""
    claims, separator, signature = text.rpartition(_SEPARATOR)
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_common_claims())
    try:
        # The limit keeps a hostile string from filling the memory before its signature is verified.
        unpacked = unpacker.decompress(base64_decode(claims), _MAX_CLAIMS)
    except (BadData, zlib.error):
        return text
    return f"{base64_encode(unpacked).decode()}{separator}{signature}"


def shard_of(session_id: str, shards: int) -> int:
    """Return the index of the gateway to which a session belongs, from 0."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards
