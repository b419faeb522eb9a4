"""Mutual authentication by challenge and response in each direction, with one key that is never sent.

The dialer authenticates first, so an unauthenticated client learns nothing from a relay, not even material for
guessing the key. A proof covers both ids, both nonces and its own side, so it cannot be replayed or reflected. After
the handshake, only TLS protects the traffic.
"""

import hashlib
import hmac
import secrets
from typing import Literal

from rollout_backend.relay.frames import VERSION, Challenge, Hello

MIN_KEY_CHARS = 32
TIMEOUT_S = 10.0
"""Time limit for the whole handshake."""


def new_id() -> str:
    """Return a random process id."""
    return secrets.token_hex(16)


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def prove(
    key: str, side: Literal["dialer", "relay"], relay_id: str, relay_nonce: bytes, dialer_id: str, dialer_nonce: bytes
) -> bytes:
    """Return a proof, valid for this handshake only, that a side knows the key."""
    parts = (b"rollout-relay", str(VERSION).encode(), side.encode(), relay_id.encode(), dialer_id.encode())
    digest = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (*parts, relay_nonce, dialer_nonce):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def hello(key: str, challenge: Challenge, dialer_id: str) -> Hello:
    nonce = new_nonce()
    proof = prove(key, "dialer", challenge.relay_id, challenge.nonce, dialer_id, nonce)
    return Hello(VERSION, dialer_id, nonce, proof)


def verify_dialer(key: str, challenge: Challenge, hello: Hello) -> bool:
    wanted = prove(key, "dialer", challenge.relay_id, challenge.nonce, hello.dialer_id, hello.nonce)
    return hmac.compare_digest(wanted, hello.proof)


def relay_proof(key: str, challenge: Challenge, hello: Hello) -> bytes:
    return prove(key, "relay", challenge.relay_id, challenge.nonce, hello.dialer_id, hello.nonce)


def verify_relay(key: str, challenge: Challenge, hello: Hello, proof: bytes) -> bool:
    return hmac.compare_digest(relay_proof(key, challenge, hello), proof)
