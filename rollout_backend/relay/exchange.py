"""All calls of one side, over one link after another.

A link is one WebSocket after its handshake. While there is none, or it is broken, calls go on: what they send is kept
by their channels. On the next link each side tells the other which calls it knows and what it wants next of each, and
both send again what is missing.

The loop that reads a link never waits for a call, so that a call that stands still holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from enum import IntEnum

import aiohttp
from aiohttp import web

from rollout_backend.relay.channel import Channel
from rollout_backend.relay.frames import (
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
"""How long a WebSocket that is closed waits for the other side's word."""


class Close(IntEnum):
    """Why a WebSocket was closed, in the range that is free for applications."""

    BROKEN_FRAME = 4400
    WRONG_KEY = 4401
    REPLACED = 4409
    WRONG_VERSION = 4426


class LinkClosed(Exception):
    """The WebSocket ended. `code` is what the other side gave, if it gave one."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the connection ended (code {code})")
        self.code = code


class CallLost(Exception):
    """A call that cannot go on: the other side is gone, or knows nothing of it. `status` is for the agent."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Link:
    """One WebSocket. What is sent goes out in order, by a task of its own."""

    def __init__(self, socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._outbox: deque[bytes] = deque()  # of each call at most its window, but of calls that are over too
        self._wake = asyncio.Event()
        self.backlog = 0
        """Bytes that were to be sent and are not yet."""

    def send(self, packed: bytes) -> None:
        """Puts it behind what is to be sent; it goes out while `writing` is entered."""
        self._outbox.append(packed)
        self.backlog += len(packed)
        self._wake.set()

    async def say(self, frame: Frame) -> None:
        """Sends it at once; for the handshake. Raises LinkClosed."""
        try:
            await self._socket.send_bytes(encode(frame))
        except ConnectionError:
            raise LinkClosed(self._socket.close_code) from None

    async def receive(self) -> Frame:
        """Raises LinkClosed, or FrameError for a message that is none."""
        message = await self._socket.receive()
        match message.type:
            case aiohttp.WSMsgType.BINARY:
                return decode(message.data)
            case aiohttp.WSMsgType.TEXT:
                raise FrameError("a text where frames are binary")
        raise LinkClosed(self._socket.close_code)

    async def close(self, code: int = aiohttp.WSCloseCode.OK, message: str = "") -> None:
        await self._socket.close(code=code, message=message.encode()[:120])

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Sends while it is entered."""
        task = asyncio.create_task(self._write())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):  # whoever reads learns of it too, and ends the link
            while True:
                while self._outbox:
                    packed = self._outbox.popleft()
                    await self._socket.send_bytes(packed)
                    self.backlog -= len(packed)
                self._wake.clear()
                await self._wake.wait()


class Exchange:
    """Base of both sides: the calls, and the link of the moment."""

    def __init__(self, reconnect_s: float) -> None:
        """`reconnect_s`: after so long without a link the calls in flight are lost."""
        self.channels: dict[int, Channel] = {}
        self.linked = asyncio.Event()
        self._link: Link | None = None
        self._reconnect_s = reconnect_s
        self._giving_up: asyncio.TimerHandle | None = None

    def send(self, packed: bytes) -> None:
        if self._link is not None:
            self._link.send(packed)

    async def serve(self, link: Link) -> None:
        """Carries the calls over this link until it ends.

        Raises:
            LinkClosed: it ended.
            FrameError: the other side sent what has no business here; the caller closes the link.
        """
        self.detach()
        async with link.writing():
            link.send(encode(Resume(tuple((call, channel.wanted) for call, channel in self.channels.items()))))
            first = await link.receive()
            if not isinstance(first, Resume):
                raise FrameError(f"a {type(first).__name__} where a Resume should come")
            self._attach(link, dict(first.calls))
            try:
                while True:
                    frame = await link.receive()
                    if self._link is not link:  # a newer one has taken over
                        raise LinkClosed(None)
                    self._take(frame)
            finally:
                if self._link is link:
                    self.detach()

    def _attach(self, link: Link, wanted: dict[int, int]) -> None:
        self._link = link
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        for call, channel in list(self.channels.items()):
            if call in wanted:
                channel.resume(wanted[call])
            else:
                self.unknown_there(channel)
        self.linked.set()

    def detach(self) -> None:
        """From now on there is no link; calls wait for the next one, but not for ever."""
        self._link = None
        self.linked.clear()
        if self._giving_up is None:
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._reconnect_s, self._give_up)

    def lose(self, failure: CallLost) -> None:
        """Ends all calls in flight: from now on they are not known here."""
        lost = list(self.channels.values())
        self.channels.clear()
        for channel in lost:
            channel.fail(failure)

    def _give_up(self) -> None:
        self._giving_up = None
        self.lose(CallLost(504, f"the other side did not come back within {self._reconnect_s:g} s"))

    def _take(self, frame: Frame) -> None:
        match frame:
            case Ack():
                if (channel := self.channels.get(frame.call)) is not None:
                    channel.acknowledged(frame.consumed)
            case Cancel():
                self.cancelled(frame.call)
            case Open():
                self.opened(frame)
            case Head() | Chunk() | End() | Abort():
                # One that is not known was given up on this side, and the other will hear of it.
                if (channel := self.channels.get(frame.call)) is not None:
                    channel.offer(frame)
            case _:
                raise FrameError(f"a {type(frame).__name__} after the handshake")

    # --- what the two sides do differently ----------------------------------------------------------------

    def opened(self, frame: Open) -> None:
        """The other side begins a call, or begins it again after a cut."""
        raise FrameError("an Open from the side that opens no calls")

    def cancelled(self, call: int) -> None:
        raise FrameError("a Cancel from the side that opens no calls")

    def unknown_there(self, channel: Channel) -> None:
        """On a new link the other side did not name this call."""
        raise NotImplementedError
