"""Keys and signatures in texts and logs."""

import logging

import pytest

from agent_wrapper.shared.redaction import redact_logs, without_key, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("POST https://g/s/1/k/a.b-c_d/v1/v1/messages failed", "POST https://g/s/1/k/.../v1/v1/messages failed"),
        (
            'PUT "https://b.s3.amazonaws.com/k/x?a=1&X-Amz-Signature=5ec" 403',
            'PUT "https://b.s3.amazonaws.com/k/x" 403',
        ),
        ("https://g/v1/models?limit=1 and /k/notes/v2", "https://g/v1/models?limit=1 and /k/notes/v2"),
    ],
)
def test_urls_are_shown_without_keys_and_signatures(text, shown):
    assert without_secrets(text) == shown


def test_a_key_is_replaced_at_every_depth_and_a_placeholder_is_not():
    key = "header.claims.signature"
    value = {"a": [f"x{key}y", {key: key}, 1, None]}
    assert without_key(value, key) == {"a": ["x[session key]y", {"[session key]": "[session key]"}, 1, None]}
    assert without_key({"a": "secret"}, "secret") == {"a": "secret"}


@pytest.fixture
def redacted(caplog, monkeypatch):
    caplog.set_level("INFO")
    make = logging.getLogRecordFactory()
    redact_logs()
    redact_logs()
    yield caplog
    logging.setLogRecordFactory(make)


def test_no_client_logs_a_key(redacted):
    logging.getLogger("a client of next year").info("%s %s", "GET", "http://g/k/a.b.c/v1/models")
    assert redacted.messages == ["GET http://g/k/.../v1/models"]
    try:
        raise ConnectionError("POST http://g/k/a.b.c/v1/models failed")
    except ConnectionError:
        logging.getLogger("agent").exception("no answer")
    assert "POST http://g/k/.../v1/models failed" in redacted.text
    assert "a.b.c" not in redacted.text


def test_a_log_record_that_cannot_be_formatted_harms_no_caller(redacted):
    make = logging.getLogRecordFactory()
    assert make("httpx", logging.INFO, __file__, 1, "%d", ("x",), None).args == ("x",)
