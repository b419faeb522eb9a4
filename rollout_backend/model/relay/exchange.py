"""Carry all calls of one side, across reconnects.

A link is one WebSocket after its handshake. A `Channel` is one call as seen by one side: what it has sent and
received, independent of the link. Calls continue without a link, because their channels keep what they send. On the
next link, each side names its calls and the next frame that it expects of each, and resends the missing frames.

Invariants:

- The loop that reads a link never waits for a call, so a blocked call does not delay the others.
- A sent frame is kept until the other side has processed it. `send` waits while `WINDOW` bytes are kept.
  Acknowledgements therefore free memory, throttle the sender, and determine what to resend after a reconnect.
- Each frame is received once and in order. A frame out of order or beyond the window is a `FrameError`, because
  neither side trusts the other's window.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from enum import IntEnum

import aiohttp
from aiohttp import web

from rollout_backend.base.logs import report_failure
from rollout_backend.model.relay.protocol import (
    MAX_CHUNK,
    MAX_FRAME,
    Abort,
    Ack,
    Cancel,
    Chunk,
    End,
    Frame,
    FrameError,
    Head,
    Numbered,
    Open,
    Resume,
    decode,
    encode,
)

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
"""Time that a closing WebSocket waits for the other side's close frame."""
WINDOW = 256 * 1024
"""Limit on bytes in transit, per call and direction."""
# Memory of a frame besides its data, so that many small frames count, too.
_FRAME_COST = 256
_ACK_EVERY = WINDOW // 4
# A connection is lost if no message arrives as a whole during this many intervals of its pings.
_HEARTBEATS = 4


class Channel:
    """The two streams of one call. `out` sends a packed frame on the current link, or drops it if there is none."""

    def __init__(self, call: int, out: Callable[[bytes], None]) -> None:
        self.call = call
        self._out = out
        self._failure: Exception | None = None
        # Set on an acknowledgement, a received frame or a failure.
        self._changed = asyncio.Event()
        # Sending. Each entry of `_kept` is a frame's number, its cost and the packed frame.
        self._next = 0
        self._kept: deque[tuple[int, int, bytes]] = deque()
        self._kept_bytes = 0
        # Receiving. Each entry of `_waiting` is a frame's cost and the frame. `_unacknowledged` counts the bytes
        # consumed since the last acknowledgement.
        self._wanted = 0
        self._waiting: deque[tuple[int, Numbered]] = deque()
        self._waiting_bytes = 0
        self._consumed = 0
        self._unacknowledged = 0

    # --- sending ------------------------------------------------------------------------------------------

    async def send(self, kind: Callable[..., Numbered], *fields: object) -> None:
        """Send a frame with these fields once the window has room. Raises the error passed to `fail`."""
        frame = kind(self.call, self._next, *fields)
        packed, cost = encode(frame), _cost(frame)
        while self._kept and self._kept_bytes + cost > WINDOW:
            await self._change()
        if self._failure is not None:
            raise self._failure
        self._kept.append((self._next, cost, packed))
        self._kept_bytes += cost
        self._next += 1
        self._out(packed)

    async def drain(self) -> None:
        """Wait until the other side has processed every frame. Raises the error passed to `fail`."""
        while self._kept:
            await self._change()

    def on_ack(self, consumed: int) -> None:
        """Free the frames below number `consumed`, which the other side has processed."""
        if consumed > self._next:
            raise FrameError(f"an Ack of {consumed} after {self._next} frames")
        while self._kept and self._kept[0][0] < consumed:
            self._kept_bytes -= self._kept.popleft()[1]
        self._changed.set()

    @property
    def is_unprocessed(self) -> bool:
        """True if the other side has not processed any frame yet."""
        return self._next == len(self._kept)

    # --- receiving ----------------------------------------------------------------------------------------

    def on_frame(self, frame: Numbered) -> None:
        """Accept a frame from the link. Raises FrameError if it is not the expected one."""
        if frame.seq != self._wanted:
            raise FrameError(f"frame {frame.seq} instead of {self._wanted}")
        cost = _cost(frame)
        if self._waiting and self._waiting_bytes + cost > WINDOW:
            raise FrameError("the window is exceeded")
        self._wanted += 1
        self._waiting.append((cost, frame))
        self._waiting_bytes += cost
        self._changed.set()

    async def receive(self) -> Numbered:
        """Return the next frame. After the last received one, raises the error passed to `fail`."""
        while not self._waiting:
            await self._change()
        return self._waiting[0][1]

    def mark_processed(self, *, now: bool = False) -> None:
        """Mark the frame from `receive` as processed. It is acknowledged `now`, or after a quarter window."""
        cost, frame = self._waiting.popleft()
        self._waiting_bytes -= cost
        self._consumed = frame.seq + 1
        self._unacknowledged += cost
        if now or self._unacknowledged >= _ACK_EVERY:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._unacknowledged = 0
        self._out(encode(Ack(self.call, self._consumed)))

    # --- a new link ---------------------------------------------------------------------------------------

    @property
    def next_expected(self) -> int:
        """Number of the next expected frame."""
        return self._wanted

    def resume(self, wanted: int) -> None:
        """On a new link, resend the frames that the other side has not received, and the last acknowledgement."""
        if wanted > self._next:
            raise FrameError(f"frame {wanted} is expected after {self._next} frames")
        for number, _, packed in self._kept:
            if number >= wanted:
                self._out(packed)
        if self._consumed:
            self._acknowledge()

    def fail(self, failure: Exception) -> None:
        """Fail the call on this side: `send`, `drain` and `receive` raise `failure`."""
        if self._failure is None:
            self._failure = failure
        self._changed.set()

    async def _change(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()


def _cost(frame: Numbered) -> int:
    match frame:
        case Chunk():
            return _FRAME_COST + len(frame.data)
        case Open() | Head():
            return _FRAME_COST + sum(len(name) + len(value) for name, value in frame.headers)
    return _FRAME_COST


def chunks(data: bytes) -> Iterator[bytes]:
    """Split data into chunks that fit into a frame."""
    for start in range(0, len(data), MAX_CHUNK):
        yield data[start : start + MAX_CHUNK]


# --- links and calls ------------------------------------------------------------------------------------------


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

    def __init__(self, socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, heartbeat_s: float) -> None:
        """`heartbeat_s` is the interval of its pings."""
        self._socket = socket
        self._silence_s = _HEARTBEATS * heartbeat_s
        # Holds at most one window per call, including ended calls.
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.backlog = 0
        """Number of queued bytes."""
        self.on_written: Callable[[], object] = lambda: None
        """Called when `backlog` has fallen."""

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
        try:
            # This counts pongs. Without it, a frame that arrives byte by byte keeps the connection open for ever.
            message = await self._socket.receive(timeout=self._silence_s)
        except TimeoutError:
            raise LinkClosed(None) from None
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
        task.add_done_callback(report_failure("sending frames"))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    packed = self._outbox.popleft()
                    await self._socket.send_bytes(packed)
                    self.backlog -= len(packed)
                    self.on_written()
                self._wake.clear()
                await self._wake.wait()
        except ConnectionError:
            # The reader notices this too, and ends the link.
            pass
        except Exception:
            await self.close(aiohttp.WSCloseCode.INTERNAL_ERROR)
            raise


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
                    if self._link is not link:
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
