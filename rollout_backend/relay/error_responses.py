"""Errors that the relay and the dialer raise themselves, in a format that the OpenAI and Anthropic SDKs parse.

These SDKs retry 429 and 5xx and respect Retry-After.
"""

import json
from collections.abc import Mapping

_RETRY_AFTER_S = {429: 1, 502: 1, 503: 2, 504: 1}
_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error")
    error = {"type": kind, "code": f"relay_{status}", "param": None, "message": f"the relay: {message}"}
    return json.dumps({"type": "error", "error": error}).encode()


def error_headers(status: int) -> Mapping[str, str]:
    headers = {"Content-Type": "application/json"}
    if status in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[status])
    return headers
