import base64
import json

import pytest
from pydantic import RootModel

from agent_wrapper.contract import Sampling
from rollout_backend.core.session_key import KeyRefused, SessionClaims, issue, sign_claims, verify

SECRET = "s" * 48
CLAIMS = SessionClaims(
    run_id="run-1",
    step=3,
    rollout_id="t1-0",
    attempt=2,
    session_id="session/any text",
    sampling=Sampling(temperature=0.7, max_tokens=100, seed=5),
    expires_at=1000.5,
)


def refused(secret: str, key: str, now: float = 0.0) -> str:
    with pytest.raises(KeyRefused) as caught:
        verify(secret, key, now)
    assert key not in str(caught.value) or not key
    return caught.value.reason


def test_a_key_contains_its_claims_until_its_deadline():
    assert verify(SECRET, issue(SECRET, CLAIMS), now=1000.0) == CLAIMS
    assert refused(SECRET, issue(SECRET, CLAIMS), now=1000.5) == "expired"
    assert refused("x" * 48, issue(SECRET, CLAIMS)) == "bad_signature"


def test_altered_claims_are_refused():
    body, signature = issue(SECRET, CLAIMS).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["session_id"] = "another"
    forged = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    assert refused(SECRET, f"{forged}.{signature}") == "bad_signature"


@pytest.mark.parametrize("signature", ["", "é", "\x00", "A" * 43, "=" * 43])
def test_an_unsigned_key_is_refused(signature):
    body, _ = issue(SECRET, CLAIMS).split(".")
    for key in (f"{body}.{signature}", f"a.b.{signature}", f"é.{signature}"):
        assert refused(SECRET, key) == "bad_signature"


@pytest.mark.parametrize("junk", ["!!!!", "=", "\n", "\x00"])
@pytest.mark.parametrize("at", [0, 10, -20, -1, None])
def test_a_key_has_one_spelling(junk, at):
    key = issue(SECRET, CLAIMS)
    assert refused(SECRET, key + junk if at is None else key[:at] + junk + key[at:]) == "bad_signature"


def test_no_other_last_character_spells_the_same_key():
    key = issue(SECRET, CLAIMS)
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_":
        assert letter == key[-1] or refused(SECRET, key[:-1] + letter) == "bad_signature"


def test_a_malformed_key_is_refused():
    for key in ("", "sk-1234", "\x00"):
        assert refused(SECRET, key) == "malformed"
    for claims in ({}, {**CLAIMS.model_dump(mode="json"), "more": 1}):
        assert refused(SECRET, sign_claims(SECRET.encode(), RootModel(claims))) == "malformed"
