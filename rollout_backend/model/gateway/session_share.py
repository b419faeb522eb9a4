"""Limit one session's use of a gateway process, so that it does not slow down other sessions.

Invariants:

- A session has a limited number of open requests. Only some of them are read, and the others wait unread: flow
  control keeps their bodies at the client.
- A session's CPU time is shared out by `CpuShares`. Its large requests are read and parsed one at a time.
- A compressed body counts as large if its contents are large. Decompressing it takes no more memory and time than the
  limit of a body allows, regardless of the size that it claims.
"""

import asyncio
import contextlib
import io
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

import zstandard
from starlette.requests import Request

from rollout_backend.model.gateway.cpu_shares import CpuShare, CpuShares
from rollout_backend.model.model_call import ApiError

_T = TypeVar("_T")
MAX_REQUESTS = 1024
"""Maximum number of open requests of one session; further requests get status 429."""
_RETRY_S = 1
_BRIEF_BYTES, _BRIEF_OBJECTS = 128 * 1024, 512
# Copying more takes as long as handing it to a thread, or longer.
_COPIED_BYTES = 512 * 1024
# A small image may have many pixels to convert. No client writes ASCII letters as escapes, except to hide them.
# Both expressions begin with plain characters: without them, `re` takes 40 times as long, 3 ms for 100 KB.
_BASE64, _ESCAPED_ASCII = re.compile(rb"64(?<=base64)", re.IGNORECASE), re.compile(rb"\\u00[2-7]")
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15
# The largest window that RFC 9659 allows.
_MAX_WINDOW_BYTES = 8 * 2**20
_ENCODINGS = ("gzip", "deflate", "zstd")


def is_brief(body: bytes | bytearray) -> bool:
    """Return whether a body is small enough to be parsed on the event loop."""
    if len(body) > _BRIEF_BYTES or body.count(b"{") > _BRIEF_OBJECTS:
        return False
    return not (_BASE64.search(body) or _ESCAPED_ASCII.search(body))


class SessionShare:
    """One session's current use of the process."""

    def __init__(self, cpu: CpuShares | None = None, max_calls: int = 64) -> None:
        """`max_calls` is the number of its requests that are read and answered at a time."""
        self.cpu = CpuShare(cpu or CpuShares())
        self._requests = 0
        self._calls = asyncio.Semaphore(max_calls)
        self._large = asyncio.Lock()

    @contextlib.contextmanager
    def request(self, limit: int = MAX_REQUESTS) -> Iterator[None]:
        """Count a request until its response is complete. Raises ApiError (429) if `limit` are open."""
        if self._requests >= limit:
            raise ApiError(
                429,
                f"this session has {limit} requests open: try again in {_RETRY_S} s",
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_S,
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextlib.asynccontextmanager
    async def entry(self, *, is_call: bool = False) -> AsyncIterator[None]:
        """Count a request like `request`, and wait until the session has paid for its earlier work."""
        with self.request():
            await self.cpu.enter(is_call=is_call)
            yield

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Begin a request like `entry`, and wait until it may be read, after the session's earlier ones."""
        async with self.entry(is_call=True), self._calls:
            yield

    @contextlib.asynccontextmanager
    async def body(
        self, request: Request, max_bytes: int, timeout_s: float, too_large: Callable[[], ApiError]
    ) -> AsyncIterator[tuple[bytes, bool]]:
        """Read and decompress a request's body. Yield it, and whether it is brief.

        The session's other large bodies are not read until the context exits.

        Raises:
            ApiError: `too_large()` beyond `max_bytes`; status 408 if the body does not arrive in time; 415 or 400 if
                it cannot be decompressed.
        """
        encoding = _encoding_of(request.headers)
        chunks, body = request.stream(), bytearray()
        brief_bytes = min(max_bytes, _BRIEF_BYTES)
        whole = await _read(chunks, body, brief_bytes, timeout_s)
        if whole:
            plain = decompress(body, encoding, brief_bytes)
            if len(plain) <= brief_bytes and is_brief(plain):
                yield plain, True
                return
        async with self._large:
            if not whole and not await _read(chunks, body, max_bytes, timeout_s):
                raise too_large()
            if encoding or len(body) > _COPIED_BYTES:
                plain = await self.cpu.run(decompress, body, encoding, max_bytes, tokenizes=False)
            else:
                plain = bytes(body)
                body.clear()
            if len(plain) > max_bytes:
                raise too_large()
            yield plain, False


async def _read(chunks: AsyncIterator[bytes], body: bytearray, limit: int, timeout_s: float) -> bool:
    """Append chunks to the body until it exceeds `limit` bytes. Return whether it is complete."""
    try:
        async with asyncio.timeout(timeout_s):
            while len(body) <= limit:
                chunk = await anext(chunks, None)
                if chunk is None:
                    return True
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from None
    return False


# --- bodies ---------------------------------------------------------------------------------------------------


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body. Raises ApiError: 413 if it is larger than `max_bytes`, 408 if it does not arrive in time."""
    body = bytearray()
    if not await _read(request.stream(), body, max_bytes, timeout_s):
        raise too_large(max_bytes)
    return bytes(body)


def _encoding_of(headers: Mapping[str, str]) -> str:
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
            # The reader accepts a truncated frame; `decompressobj` does not, but has no limit.
            if len(plain) <= limit:
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
