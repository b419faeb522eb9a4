"""Read a container's response to an invoke, completely or not at all.

Invariants:

- at most `MAX_BYTES` are read, even if the container sends more;
- a response that may be truncated raises, so that its outcome is unknown instead of misread.
"""

from __future__ import annotations

import json

import aiohttp

from rollout_backend import aws

MAX_BYTES = 64 * 1024  # the wrapper answers with some tens


async def read_answer(reply: aiohttp.ClientResponse) -> bytes:
    """Return the first `MAX_BYTES` of the answer's body.

    Raises:
        aiohttp.ClientError: the connection broke in the middle of it.
        ConnectionError: nothing says how long it is, and it is not a whole JSON value.
    """
    body = await aws.read_up_to(reply, MAX_BYTES)
    framed = "Content-Length" in reply.headers or reply.headers.get("Transfer-Encoding", "").lower() == "chunked"
    if not framed and not _is_json(body):
        raise ConnectionError(f"the answer has no Content-Length, and may have been cut: {body[:200]!r}")
    return body


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
