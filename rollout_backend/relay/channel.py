"""One call as seen by one side: what it has sent and received, independent of the link.

Invariants:

- A sent frame is kept until the other side has processed it. `send` waits while `WINDOW` bytes are kept.
  Acknowledgements thus free memory, throttle the sender, and determine what to resend after a reconnect.
- Each frame is received once and in order: on a new link, each side names the next frame that it expects. A frame out
  of order or beyond the window is a `FrameError`, because neither side trusts the other's window.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from rollout_backend.relay.protocol import MAX_CHUNK, Ack, Chunk, FrameError, Head, Numbered, Open, encode

WINDOW = 256 * 1024
"""Limit on bytes in transit, per call and direction."""
_FRAME_COST = 256  # memory of a frame besides its data, so that many small frames count too
_ACK_EVERY = WINDOW // 4


class Channel:
    """The two streams of one call. `out` sends a packed frame on the current link, or drops it without one."""

    def __init__(self, call: int, out: Callable[[bytes], None]) -> None:
        self.call = call
        self._out = out
        self._failure: Exception | None = None
        self._changed = asyncio.Event()  # set on an acknowledgement, a received frame, or a failure
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

    # --- both ---------------------------------------------------------------------------------------------

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
