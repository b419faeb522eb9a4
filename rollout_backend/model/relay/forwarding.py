"""Decide which paths, methods and headers are forwarded, and answer the calls that are not. Pure.

The relay checks first. The dialer does not trust the relay and checks again.

    /v1, /v1/...       to the gateway; clients probe /v1 itself
    /k/KEY/v1/...      to the gateway, which takes the session key from it
    /s/SHARD/...       to one of several gateway processes, without /s/SHARD

No other path is forwarded, in particular not /control. Ambiguous paths (dots, escapes, doubled slashes) are refused.

The OpenAI and Anthropic SDKs can parse the errors that the relay and the dialer raise themselves. They retry 429 and
5xx and respect Retry-After.
"""

import json
import re
from collections.abc import Iterable, Mapping

from rollout_backend.model.relay.protocol import MAX_HEADERS, Headers

METHODS = frozenset({"GET", "POST", "DELETE"})
_PATH = re.compile(
    r"(?:/s/([A-Za-z0-9_-]{1,64}))?((?:/k/[A-Za-z0-9._-]+)?/v1(?:/(?:[A-Za-z0-9._~:@-]|%2[Ff])+)*/?)"
    r"(?:\?[\x21-\x7e]*)?"
)
# Model names contain the escaped slash.
_SLASH = re.compile("/|%2[Ff]")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_HOP_BY_HOP = frozenset(
    {
        "connection", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_RETRY_AFTER_S = {429: 1, 502: 1, 503: 2, 504: 1}
_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def route(path: str) -> tuple[str, str] | None:
    """Return the shard (empty if the path names none) and the rest with its query; None if it is refused."""
    match = _PATH.fullmatch(path)
    if match is None or any(set(part) <= {"."} for part in _SLASH.split(match[2].removesuffix("/"))[1:]):
        return None
    return match[1] or "", path[match.start(2) :]


def forwarded_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return the end-to-end headers.

    Raises:
        ValueError: the headers exceed the size limit of a frame, or are not printable ASCII.
    """
    pairs = list(headers)
    named = {name.strip().lower() for key, value in pairs if key.lower() == "connection" for name in value.split(",")}
    kept = tuple((key, value) for key, value in pairs if key.lower() not in _HOP_BY_HOP | named)
    if sum(len(key) + len(value) for key, value in kept) > MAX_HEADERS:
        raise ValueError(f"the headers are larger than {MAX_HEADERS} bytes")
    if not all(_NAME.fullmatch(key) and _VALUE.fullmatch(value) for key, value in kept):
        raise ValueError("the headers must be printable ASCII")
    return kept


def error_body(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error")
    error = {"type": kind, "code": f"relay_{status}", "param": None, "message": f"the relay: {message}"}
    return json.dumps({"type": "error", "error": error}).encode()


def error_headers(status: int) -> Mapping[str, str]:
    headers = {"Content-Type": "application/json"}
    if status in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[status])
    return headers
