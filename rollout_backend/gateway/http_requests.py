"""Read requests: their keys, their bodies, and whether their clients are still connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rollout_backend.core.api_error import ApiError

_MAX_DIGITS = 15  # Python refuses to convert thousands of digits


def bearer(request: Request) -> str:
    """Return the bearer token of a request, or an empty string."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body. Raises ApiError (413) if it is larger than `max_bytes`."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > _MAX_DIGITS or int(length) > max_bytes):
        raise too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large(max_bytes)
    return bytes(body)


async def wait_or_disconnect(request: Request, waiting: Awaitable[Any]) -> None:
    """Wait for `waiting`, but not after the client has hung up: then raise ClientDisconnect.

    A future or a task is not cancelled; a coroutine is.
    """
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
    finally:
        if task is not waiting:
            task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
