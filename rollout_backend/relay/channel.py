"""One call as one side sees it: what it has sent and received, on any link.

Invariants:

- A sent frame is kept until the other side has processed it. `send` waits while `WINDOW` bytes are kept. So the
  acknowledgements free memory, slow down a sender, and determine what to resend after a cut.
- Frames are received once each, in the order of their numbers: on a new link each side names the next frame that it
  expects. A frame out of order, or beyond the window, is a `FrameError`: neither side trusts the other's window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from rollout_backend.relay.frames import MAX_CHUNK, Ack, Chunk, FrameError, Head, Numbered, Open, encode

WINDOW = 256 * 1024
"""Limit of bytes in transit, per call and direction."""
_FRAME_COST = 256  # memory of a frame besides its data; many small frames use memory too
_ACK_EVERY = WINDOW // 4


class Channel:
    """The two streams of one call. `out` sends a packed frame on the current link, or drops it if there is none."""

    def __init__(self, call: int, out: Callable[[bytes], None]) -> None:
        self.call = call
        self._out = out
        self._failure: Exception | None = None
        self._changed = asyncio.Event()  # something was acknowledged or received, or the call has failed
        # sending
        self._next = 0
        self._kept: deque[tuple[int, int, bytes]] = deque()  # number, cost, packed frame
        self._kept_bytes = 0
        # receiving
        self._wanted = 0
        self._waiting: deque[tuple[int, Numbered]] = deque()  # cost, frame
        self._waiting_bytes = 0
        self._consumed = 0
        self._unacknowledged = 0  # bytes consumed since the last acknowledgement

    # --- sending ------------------------------------------------------------------------------------------

    async def send(self, make: Callable[[int, int], Numbered]) -> None:
        """Send the frame `make(call, number)` once the window has room. Raise the error that `fail` got."""
        frame = make(self.call, self._next)
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
        """Return once the other side has processed every frame. Raise the error that `fail` got."""
        while self._kept:
            await self._change()

    def on_ack(self, consumed: int) -> None:
        """Free the frames below `consumed`, which the other side has processed."""
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
        """Take a frame from the link. Raise FrameError if it is not the expected one."""
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
        """Return the next frame. Raise the error that `fail` got after the last received frame."""
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

    # --- both ---------------------------------------------------------------------------------------------

    @property
    def next_expected(self) -> int:
        """The number of the next expected frame."""
        return self._wanted

    def resume(self, wanted: int) -> None:
        """Resend, on a new link, the frames that the other side has not received, and the last acknowledgement."""
        if wanted > self._next:
            raise FrameError(f"frame {wanted} is expected after {self._next} frames")
        for number, _, packed in self._kept:
            if number >= wanted:
                self._out(packed)
        if self._consumed:
            self._acknowledge()

    def fail(self, failure: Exception) -> None:
        """End the call on this side: `send`, `drain` and `receive` raise `failure`."""
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
    """Split data into parts that fit a frame."""
    for start in range(0, len(data), MAX_CHUNK):
        yield data[start : start + MAX_CHUNK]
