"""All calls of one side, across reconnects.

A link is one WebSocket after its handshake. Calls continue without a link, because their channels keep what they
send. On the next link, each side names its calls and the next frame that it expects of each, and both resend what is
missing.

The loop that reads a link never waits for a call, so a blocked call does not delay the others.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from enum import IntEnum

import aiohttp
from aiohttp import web

from rollout_backend.relay.channel import Channel
from rollout_backend.relay.protocol import (
    MAX_FRAME,
    Abort,
    Ack,
    Cancel,
    Chunk,
    End,
    Frame,
    FrameError,
    Head,
    Open,
    Resume,
    decode,
    encode,
)

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
"""Time that a closing WebSocket waits for the other side's close frame."""


class Close(IntEnum):
    """Close codes, from the range for applications."""

    BROKEN_FRAME = 4400
    WRONG_KEY = 4401
    REPLACED = 4409
    WRONG_VERSION = 4426


class LinkClosed(Exception):
    """Raised when the WebSocket ends. `code` is the other side's close code, if it sent one."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the connection ended (code {code})")
        self.code = code


class CallLost(Exception):
    """A call that cannot continue: the other side is gone or does not know the call. The agent gets `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Link:
    """One WebSocket. A background task sends the frames in order."""

    def __init__(self, socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._outbox: deque[bytes] = deque()  # at most one window per call, including ended calls
        self._wake = asyncio.Event()
        self.backlog = 0
        """Number of queued bytes."""

    def send(self, packed: bytes) -> None:
        """Queue a packed frame, which is sent while `writing` is entered."""
        self._outbox.append(packed)
        self.backlog += len(packed)
        self._wake.set()

    async def send_now(self, frame: Frame) -> None:
        """Send a frame immediately, for the handshake. Raises LinkClosed."""
        try:
            await self._socket.send_bytes(encode(frame))
        except ConnectionError:
            raise LinkClosed(self._socket.close_code) from None

    async def receive(self, max_bytes: int = MAX_FRAME) -> Frame:
        """Return the next frame. Raises LinkClosed, or FrameError for an invalid message."""
        message = await self._socket.receive()
        match message.type:
            case aiohttp.WSMsgType.BINARY:
                if len(message.data) > max_bytes:
                    raise FrameError(f"a message of {len(message.data)} bytes")
                return decode(message.data)
            case aiohttp.WSMsgType.TEXT:
                raise FrameError("a text message instead of a binary one")
        raise LinkClosed(self._socket.close_code)

    async def close(self, code: int = aiohttp.WSCloseCode.OK, message: str = "") -> None:
        await self._socket.close(code=code, message=message.encode()[:120])

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Send queued frames in the background."""
        task = asyncio.create_task(self._write())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader notices this too, and ends the link
            while True:
                while self._outbox:
                    packed = self._outbox.popleft()
                    await self._socket.send_bytes(packed)
                    self.backlog -= len(packed)
                self._wake.clear()
                await self._wake.wait()


class Exchange:
    """Base class of both sides: the calls in flight and the current link."""

    def __init__(self, reconnect_s: float) -> None:
        """The calls in flight fail after `reconnect_s` without a link."""
        self.channels: dict[int, Channel] = {}
        self.linked = asyncio.Event()
        self._link: Link | None = None
        self._reconnect_s = reconnect_s
        self._reconnect_timer: asyncio.TimerHandle | None = None

    def send(self, packed: bytes) -> None:
        if self._link is not None:
            self._link.send(packed)

    async def serve(self, link: Link) -> None:
        """Exchange frames over this link until it ends.

        Raises:
            LinkClosed: the link ended.
            FrameError: the other side sent an invalid frame; the caller closes the link.
        """
        self.detach()
        async with link.writing():
            link.send(encode(Resume(tuple((call, channel.next_expected) for call, channel in self.channels.items()))))
            first = await link.receive()
            if not isinstance(first, Resume):
                raise FrameError(f"a {type(first).__name__} instead of a Resume")
            self._attach(link, dict(first.calls))
            try:
                while True:
                    frame = await link.receive()
                    if self._link is not link:  # a newer link has replaced it
                        raise LinkClosed(None)
                    self._handle_frame(frame)
            finally:
                if self._link is link:
                    self.detach()

    def _attach(self, link: Link, wanted: dict[int, int]) -> None:
        self._link = link
        if self._reconnect_timer is not None:
            self._reconnect_timer.cancel()
            self._reconnect_timer = None
        for call, channel in list(self.channels.items()):
            if call in wanted:
                channel.resume(wanted[call])
            else:
                self.on_unknown_call(channel)
        self.linked.set()

    def detach(self) -> None:
        """Drop the link. Calls wait up to `reconnect_s` for the next one."""
        self._link = None
        self.linked.clear()
        if self._reconnect_timer is None:
            loop = asyncio.get_running_loop()
            self._reconnect_timer = loop.call_later(self._reconnect_s, self._on_reconnect_timeout)

    def fail_calls(self, failure: CallLost) -> None:
        """Fail all calls in flight, and forget them."""
        lost = list(self.channels.values())
        self.channels.clear()
        for channel in lost:
            channel.fail(failure)

    def _on_reconnect_timeout(self) -> None:
        self._reconnect_timer = None
        self.fail_calls(CallLost(504, f"the other side did not reconnect within {self._reconnect_s:g} s"))

    def _handle_frame(self, frame: Frame) -> None:
        match frame:
            case Ack():
                if (channel := self.channels.get(frame.call)) is not None:
                    channel.on_ack(frame.consumed)
            case Cancel():
                self.on_cancel(frame.call)
            case Open():
                self.on_open(frame)
            case Head() | Chunk() | End() | Abort():
                # This side has given up the call; the other side gets a Cancel or Resume.
                if (channel := self.channels.get(frame.call)) is not None:
                    channel.on_frame(frame)
            case _:
                raise FrameError(f"a {type(frame).__name__} after the handshake")

    # --- what a side overrides ----------------------------------------------------------------------------

    def on_open(self, frame: Open) -> None:
        """Handle a call that the other side opens, or reopens after a reconnect."""
        raise FrameError("an Open from the side that opens no calls")

    def on_cancel(self, call: int) -> None:
        raise FrameError("a Cancel from the side that opens no calls")

    def on_unknown_call(self, channel: Channel) -> None:
        """Handle a call that the other side did not name on the new link."""
        raise NotImplementedError
