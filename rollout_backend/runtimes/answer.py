"""Read a container's response to an invoke, completely or not at all.

Invariants:

- at most `MAX_BYTES` are read, even if the container sends more;
- a response that may be truncated raises an error, so that its outcome counts as unknown instead of being misread.
"""

import json

import aiohttp

from rollout_backend import aws

MAX_BYTES = 64 * 1024  # the wrapper's answers have some tens of bytes


async def read_answer(reply: aiohttp.ClientResponse) -> bytes:
    """Return the first `MAX_BYTES` of the response's body.

    Raises:
        aiohttp.ClientError: the connection was lost in the middle of the body.
        ConnectionError: the body has no declared length and is not a complete JSON value.
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
