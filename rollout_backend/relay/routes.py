"""Decide which paths, methods and headers are forwarded. Pure.

The relay checks first. The dialer does not trust the relay and checks again.

    /v1, /v1/...       to the gateway; clients probe /v1 itself
    /k/KEY/v1/...      to the gateway, which takes the session key from it
    /s/SHARD/...       to one of several gateway processes, without /s/SHARD

No other path is forwarded, in particular not /control. Ambiguous paths (dots, escapes, doubled slashes) are refused.
"""

import re
from collections.abc import Iterable

from rollout_backend.relay.frames import MAX_HEADERS, Headers

METHODS = frozenset({"GET", "POST", "DELETE"})
_PATH = re.compile(
    r"(?:/s/([A-Za-z0-9_-]{1,64}))?((?:/k/[A-Za-z0-9._-]+)?/v1(?:/(?:[A-Za-z0-9._~:@-]|%2[Ff])+)*/?)"
    r"(?:\?[\x21-\x7e]*)?"
)
_SLASH = re.compile("/|%2[Ff]")  # model names contain the second one
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_HOP_BY_HOP = frozenset(
    {
        "connection", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip


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
