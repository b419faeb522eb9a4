"""Who is at the other end: a challenge and a response in each direction, over one key that never travels.

The dialer proves itself first, so that whoever calls a relay learns nothing from it, not even something to guess at.
A proof covers both names, both nonces and which side made it: it cannot be used again, elsewhere, or sent back.
What is said after the handshake is protected by TLS, and by nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

from rollout_backend.relay.frames import VERSION, Challenge, Hello

MIN_KEY_CHARS = 32
TIMEOUT_S = 10.0
"""Of the whole handshake."""


def new_id() -> str:
    """Names one process for as long as it lives."""
    return secrets.token_hex(16)


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def prove(
    key: str, side: Literal["dialer", "relay"], relay_id: str, relay_nonce: bytes, dialer_id: str, dialer_nonce: bytes
) -> bytes:
    """What only somebody who knows the key can say in this handshake."""
    parts = (b"rollout-relay", str(VERSION).encode(), side.encode(), relay_id.encode(), dialer_id.encode())
    digest = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (*parts, relay_nonce, dialer_nonce):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def hello(key: str, challenge: Challenge, dialer_id: str) -> Hello:
    nonce = new_nonce()
    proof = prove(key, "dialer", challenge.relay_id, challenge.nonce, dialer_id, nonce)
    return Hello(VERSION, dialer_id, nonce, proof)


def is_dialer(key: str, challenge: Challenge, said: Hello) -> bool:
    wanted = prove(key, "dialer", challenge.relay_id, challenge.nonce, said.dialer_id, said.nonce)
    return hmac.compare_digest(wanted, said.proof)


def relay_proof(key: str, challenge: Challenge, said: Hello) -> bytes:
    return prove(key, "relay", challenge.relay_id, challenge.nonce, said.dialer_id, said.nonce)


def is_relay(key: str, challenge: Challenge, said: Hello, proof: bytes) -> bool:
    return hmac.compare_digest(relay_proof(key, challenge, said), proof)
