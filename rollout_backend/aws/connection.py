"""An HTTP/1.1 connection that carries one call at a time.

Invariants:

- A connection is used again only if its last response was complete, nothing followed it, and both sides keep it.
- A response that is truncated or malformed raises. One without a length ends with its connection.
- While a body is not read, about `_READ_AHEAD` bytes of it are held in memory.
- Without a byte for `read_timeout_s`, a call fails.

Errors are aiohttp's, so callers need not know which client sent their call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import aiohttp
import httptools
from multidict import CIMultiDict

_READ_AHEAD = 1024 * 1024
_MAX_HEAD = 64 * 1024  # bytes of a response before its body


class Response:
    """A response whose head has arrived. It has what this package uses of aiohttp's.

    Enter it to read its body: leaving it early closes the connection.
    """

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection = connection
        self._pieces: list[bytes] = []  # received and not read
        self._size = 0  # of these
        self._complete = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def content(self) -> Self:
        """The body."""
        return self

    async def read(self) -> bytes:
        """Return the whole body."""
        while not self._complete:
            await self._wait()
        return self._take()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while True:
            if self._pieces:
                yield self._take()
            elif self._complete:
                return
            else:
                await self._wait()

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return data

    async def _wait(self) -> None:
        if self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            self._connection.resume()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._complete:
            self._connection.abort()

    # --- called by the connection -------------------------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """Add a piece of the body. Return whether the connection should pause."""
        self._pieces.append(data)
        self._size += len(data)
        self._wake()
        return self._size >= _READ_AHEAD and self._reader is None

    def finish(self, error: Exception | None = None) -> None:
        self._complete = error is None
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Connection(asyncio.Protocol):
    """A connection, and the parser's callbacks. `call` may be called while it is idle."""

    def __init__(self, read_timeout_s: float, on_idle: Callable[[Connection], None]) -> None:
        """`on_idle` is called after each call, and for a connection that closes during a call."""
        self._loop = asyncio.get_running_loop()
        self._read_timeout_s = read_timeout_s
        self._on_idle = on_idle
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None  # of the call
        self._head: asyncio.Future[Response] | None = None  # of the call
        self._head_size = 0
        self._received_all = False  # of the call's response
        self._keep = False  # the server keeps the connection
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self.is_open = False
        self.last_active = 0.0
        self.closed = self._loop.create_future()

    async def call(self, request: bytes) -> Response:
        """Send a request and return its response once its head has arrived.

        Raises:
            aiohttp.ClientError: the connection broke, the response is malformed, or no byte came in time.
        """
        self._response = response = Response(self)
        self._head = self._loop.create_future()
        self._head_size = 0
        self._received_all = False
        self.last_active = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self.last_active + self._read_timeout_s, self._check_time)
        self._transport.write(request)
        try:
            return await self._head
        except BaseException:
            if self._response is response:  # else it may carry another call by now
                self.abort()
            raise

    def abort(self) -> None:
        """Close the connection. A call in progress fails."""
        self._close(aiohttp.ClientConnectionError("the connection was closed"))

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.last_active = self._loop.time()
            self._transport.resume_reading()

    def _check_time(self) -> None:
        """Fail a call without progress. The timer is not set again for each call, since it rarely matters."""
        self._timer = None
        if self._response is None:
            return
        now, unsent = self._loop.time(), self._transport.get_write_buffer_size()
        if self._paused or unsent != self._unsent:
            self.last_active = now
        self._unsent = unsent
        if now >= self.last_active + self._read_timeout_s:
            self._close(aiohttp.SocketTimeoutError("Timeout on reading data from socket"))
        else:
            self._timer = self._loop.call_at(self.last_active + self._read_timeout_s, self._check_time)

    def _close(self, error: Exception) -> None:
        self._shut()
        self._end(error)

    def _shut(self) -> None:
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    def _end(self, error: Exception | None = None) -> None:
        """End the call, if there is one."""
        response, head = self._response, self._head
        if response is None or head is None:
            return
        self._response = self._head = None
        if self.is_open:  # the last piece of a body may have paused reading
            self.resume()
        if head.done():
            response.finish(error)
        elif error is not None:
            head.set_exception(error)
        self._on_idle(self)

    # --- the transport's callbacks ------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # an answer to no call
            self.abort()
            return
        self.last_active = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._shut()
            if not self._received_all:
                self._end(aiohttp.ClientPayloadError(f"the response is malformed: {error}"))
                return
        if self._received_all:
            if not self._keep or self._transport.get_write_buffer_size():
                self._shut()
            self._end()
        elif not response.status:
            self._head_size += len(data)
            if self._head_size > _MAX_HEAD:
                self._close(aiohttp.ClientPayloadError(f"the response's headers exceed {_MAX_HEAD} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._end(self._cut_off(self._response, error))
        if not self.closed.done():
            self.closed.set_result(None)

    def _cut_off(self, response: Response, error: Exception | None) -> Exception | None:
        """Return what is wrong with a response that ends with the connection."""
        if not response.status:
            return aiohttp.ClientOSError(*error.args) if error else aiohttp.ServerDisconnectedError()
        if error or "Content-Length" in response.headers or "Transfer-Encoding" in response.headers:
            return aiohttp.ClientPayloadError(f"the connection was closed before the end of the body: {error}")
        return None

    # --- the parser's callbacks ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._received_all:  # a second response to one call
            self._shut()

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        if response is not None and not response.status and not self._received_all:  # else it is a trailer
            response.headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        status, response = self._parser.get_status_code(), self._response
        if response is None or self._head is None or self._received_all:
            return
        if status < 200:  # the final response follows
            response.headers.clear()
            return
        response.status = status
        if not self._head.done():
            self._head.set_result(response)

    def on_body(self, body: bytes) -> None:
        if self._response is not None and not self._received_all and self._response.feed(body):
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response is not None and self._response.status:
            self._received_all = True
            self._keep = self._parser.should_keep_alive()
