"""Session keys that were checked before: what does not change is not checked again."""

import time
from types import SimpleNamespace

import pytest

from gateway_server import CONTROL_KEY, SECRET, session_key
from rollout_backend.core.api_error import ApiError
from rollout_backend.gateway import authentication
from rollout_backend.gateway.authentication import Authenticator
from rollout_backend.gateway.gateway_settings import GatewaySettings


@pytest.fixture
def authenticator(byte_model) -> Authenticator:
    settings = GatewaySettings(port=0, model=byte_model, engine_url="", secret=SECRET, control_key=CONTROL_KEY)
    return Authenticator(settings, "")


@pytest.fixture
def checks(monkeypatch) -> list[str]:
    """The keys whose signature was checked."""
    checked: list[str] = []
    verify = authentication.verify

    def record(secret, key, now, previous_secret):
        checked.append(key)
        return verify(secret, key, now, previous_secret)

    monkeypatch.setattr(authentication, "verify", record)
    return checked


def asked(key: str):
    return SimpleNamespace(headers={"authorization": f"Bearer {key}"})


def test_a_known_key_expires(authenticator, monkeypatch):
    key = session_key("s1", lives_s=60)
    authenticator.session(asked(key))
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(ApiError, match="expired"):
        authenticator.session(asked(key))


def test_another_signature_for_a_known_keys_claims_is_refused(authenticator):
    key = session_key("s1")
    authenticator.session(asked(key))
    forged = session_key("s1", secret="another-secret-" * 4)
    for other in (forged, key[:-2], f"{key.rpartition('.')[0]}.{forged.rpartition('.')[2]}"):
        with pytest.raises(ApiError, match="refused"):
            authenticator.session(asked(other))


def test_only_so_many_keys_are_remembered(authenticator, checks):
    keys = [session_key(f"s{i}") for i in range(authentication._MAX_VERIFIED + 1)]
    for key in [*keys, keys[-1], keys[0]]:
        authenticator.session(asked(key))
    assert checks == [*keys, keys[0]]


def test_keys_of_the_previous_secret_are_accepted_and_none_older(byte_model):
    secrets = {"secret": "the-new-secret-" * 4, "previous_secret": SECRET}
    settings = GatewaySettings(port=0, model=byte_model, engine_url="", control_key=CONTROL_KEY, **secrets)
    authenticator = Authenticator(settings, "")
    assert authenticator.session(asked(session_key("s1"))).session_id == "s1"
    assert authenticator.session(asked(session_key("s2", secret=secrets["secret"]))).session_id == "s2"
    with pytest.raises(ApiError, match="bad_signature"):
        authenticator.session(asked(session_key("s3", secret="an-older-secret-" * 4)))
