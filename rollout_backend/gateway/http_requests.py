"""Read requests: their keys, their bodies, and whether their clients are still connected.

Invariants:

- Decompressing a body takes no more memory and time than its limit allows, whatever size it claims to have.
- Behind `PathKeys`, no path contains a key, so no log, error, trace or journal can contain one.
"""

import asyncio
import io
import re
import zlib
from collections.abc import Awaitable, Mapping
from typing import Any

import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_backend.core.api_error import ApiError

_MAX_DIGITS = 15  # Python refuses to convert thousands of digits
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15  # zlib's window bits
_MAX_WINDOW_BYTES = 8 * 2**20  # the largest window that RFC 9659 allows
_KEY_PATH = re.compile(r"/k/([A-Za-z0-9._-]+)(/v1/.*)", re.DOTALL)
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_ENCODINGS = ("gzip", "deflate", "zstd")


class PathKeys:
    """ASGI middleware that takes session keys from URLs, for agents that hard-code an API key or send none.

    /k/KEY/v1/... is served as /v1/... with the session key KEY, which replaces any key in the headers. Unless
    `enabled`, the path is not found.
    """

    def __init__(self, app: ASGIApp, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := _KEY_PATH.fullmatch(scope["path"])):
            key, path = found.groups()
            headers = scope["headers"]
            if self._enabled:
                headers = [(name, value) for name, value in headers if name not in _KEY_HEADERS]
                headers.append((b"authorization", b"Bearer " + key.encode()))
            else:
                path = f"/k/...{path}"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(scope, receive, send)


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


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return the encoding of the body; an empty string if it is not compressed.

    Raises:
        ApiError: status 415 if the gateway does not support it.
    """
    encoding = headers.get("content-encoding", "").strip().lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return ""
    if encoding not in _ENCODINGS:
        raise ApiError(
            415,
            f"content-encoding: {encoding[:100]!r} cannot be decompressed; use {', '.join(_ENCODINGS)} or none",
            code="unsupported_encoding",
            param="content-encoding",
        )
    return encoding


def decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """Return the contents of a body, or their first `limit` + 1 bytes.

    Raises:
        ApiError: status 400 if the body is damaged or incomplete.
    """
    if not encoding:
        return bytes(body)
    try:
        if encoding == "zstd":
            zstd = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            plain = bytes(zstd.stream_reader(io.BytesIO(body)).read(limit + 1))
            decompressor: Any = zstd.decompressobj()
            if len(plain) <= limit:  # the reader accepts a truncated frame, and this has no limit
                decompressor.decompress(body)
        else:
            decompressor = zlib.decompressobj(_GZIP if encoding == "gzip" else _deflate_bits(body))
            plain = decompressor.decompress(body, limit + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise _damaged(encoding, str(error)) from None
    if len(plain) <= limit and (not decompressor.eof or decompressor.unused_data):
        raise _damaged(encoding, "it is cut, or other data follow it")
    return plain


def _deflate_bits(body: bytes | bytearray) -> int:
    """Return the window bits. RFC 9110 defines `deflate` as zlib's format, but some clients send raw data."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    return _ZLIB if has_header else _RAW_DEFLATE


def _damaged(encoding: str, why: str) -> ApiError:
    return ApiError(400, f"content-encoding: the body is no complete {encoding}: {why}", param="content-encoding")


async def wait_or_disconnect(request: Request, waiting: Awaitable[Any]) -> None:
    """Wait for `waiting`. Raise ClientDisconnect as soon as the client disconnects.

    A coroutine is then cancelled and its error raised; a future or task continues and keeps its error.
    """
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
        if task is not waiting:
            task.result()
    finally:
        if task is not waiting:
            task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
