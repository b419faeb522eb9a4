"""Read requests: their keys, their bodies, and whether their clients are still connected.

Invariant: a compressed body costs no more memory and time than its limit allows, whatever it claims to hold.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Awaitable, Mapping
from typing import Any

import zstandard
from starlette.requests import ClientDisconnect, Request

from rollout_backend.core.api_error import ApiError

_MAX_DIGITS = 15  # Python refuses to convert thousands of digits
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15  # zlib's window bits
_MAX_WINDOW_BYTES = 8 * 2**20  # what RFC 9659 allows
_ENCODINGS = ("gzip", "deflate", "zstd")


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
    """Return the body's encoding; an empty string if it is not compressed.

    Raises:
        ApiError: status 415 if it is none of those that this gateway reads.
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
            if len(plain) <= limit:  # a reader takes a cut frame for a whole one, and this has no limit
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
    """RFC 9110 means zlib's format by `deflate`. Some clients send the data without its header."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    return _ZLIB if has_header else _RAW_DEFLATE


def _damaged(encoding: str, why: str) -> ApiError:
    return ApiError(400, f"content-encoding: the body is no complete {encoding}: {why}", param="content-encoding")


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
