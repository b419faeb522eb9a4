"""Keep session keys and signatures out of a container's logs and results.

With `gateway.key_in_path`, the URLs of model calls contain a session key, and presigned URLs contain a signature.
HTTP clients write complete URLs to their logs, if the agent enables them, and to the messages of exceptions.
"""

import logging
import re
import traceback
from collections.abc import Callable
from typing import Any

_URL = re.compile(r"https?://[^\s\"']+")
_KEY_IN_PATH = re.compile(r"/k/[A-Za-z0-9._-]+/v1\b")
_MIN_KEY_CHARS = 16
_SHOWN = "[session key]"


def without_secrets(text: str) -> str:
    """Remove the signatures and the keys in the paths of all URLs."""
    return _KEY_IN_PATH.sub("/k/.../v1", _URL.sub(_without_signature, text))


def _without_signature(url: re.Match[str]) -> str:
    place, _, query = url[0].partition("?")
    return place if "X-Amz-Signature" in query else url[0]


def without_key(value: Any, key: str) -> Any:
    """Replace the key in all strings of a JSON value. A short key is a placeholder of a test, not a secret."""
    if len(key) < _MIN_KEY_CHARS:
        return value
    match value:
        case str():
            return value.replace(key, _SHOWN)
        case dict():
            return {without_key(name, key): without_key(item, key) for name, item in value.items()}
        case list() | tuple():
            return [without_key(item, key) for item in value]
        case _:
            return value


def redact_logs() -> None:
    """Remove secrets from all later log records, whichever HTTP client writes them.

    A list of loggers would miss the next client: openai 3 logs through `httpx2`.
    """
    make = logging.getLogRecordFactory()
    if not isinstance(make, _Redacting):
        logging.setLogRecordFactory(_Redacting(make))


class _Redacting:
    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **more: Any) -> logging.LogRecord:
        record = self._make(*args, **more)
        try:
            text = record.getMessage()
            if (shown := without_secrets(text)) != text:
                record.msg, record.args = shown, ()
            if record.exc_info and record.exc_info[0] is not None:
                text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
                if (shown := without_secrets(text)) != text:
                    # Formatters use this string instead of the exception.
                    record.exc_text = shown
        except Exception:  # noqa: S110
            # The handler reports a record that cannot be formatted.
            pass
        return record
