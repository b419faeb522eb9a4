"""One call as one side sees it: what it has sent and what it has received, whichever link carries it.

What must always hold:

- A frame that was sent is kept until the other side has dealt with it; at most `WINDOW` bytes are kept, then `send`
  waits. So the same acknowledgements free memory, slow down a sender, and tell what to send again after a cut.
- Frames are taken in the order of their numbers and once each: on a new link each side says which it wants next. One
  out of order, or beyond the window, is a `FrameError`: the other side is not trusted to keep to its own window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from rollout_backend.relay.frames import MAX_CHUNK, Ack, Chunk, FrameError, Head, Numbered, Open, encode

WINDOW = 256 * 1024
"""Bytes of one call in one direction that may be on their way."""
_FRAME_COST = 256  # what a frame takes beside its data; many small ones are memory too
_ACK_EVERY = WINDOW // 4


class Channel:
    """`out` takes a packed frame for the link of the moment, or drops it if there is none."""

    def __init__(self, call: int, out: Callable[[bytes], None]) -> None:
        self.call = call
        self._out = out
        self._failure: Exception | None = None
        self._changed = asyncio.Event()  # something was acknowledged or received, or the call has failed
        # sent
        self._next = 0
        self._kept: deque[tuple[int, int, bytes]] = deque()  # number, cost, packed
        self._kept_bytes = 0
        # received
        self._wanted = 0
        self._waiting: deque[tuple[int, Numbered]] = deque()  # cost, frame
        self._waiting_bytes = 0
        self._consumed = 0
        self._unacknowledged = 0  # bytes that were consumed since the last acknowledgement

    # --- what this side sends -----------------------------------------------------------------------------

    async def send(self, make: Callable[[int, int], Numbered]) -> None:
        """Sends the frame that `make(call, number)` is, as soon as the window has room for it.

        Raises what `fail` was given.
        """
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

    async def drained(self) -> None:
        """Returns once the other side has dealt with everything. Raises what `fail` was given."""
        while self._kept:
            await self._change()

    def acknowledged(self, consumed: int) -> None:
        """The other side has dealt with all frames below `consumed`."""
        if consumed > self._next:
            raise FrameError(f"an Ack of {consumed} where {self._next} frames were sent")
        while self._kept and self._kept[0][0] < consumed:
            self._kept_bytes -= self._kept.popleft()[1]
        self._changed.set()

    @property
    def untouched(self) -> bool:
        """Whether the other side has dealt with nothing yet."""
        return self._next == len(self._kept)

    # --- what it receives ---------------------------------------------------------------------------------

    def offer(self, frame: Numbered) -> None:
        """Takes a frame from the link. Raises FrameError if it is not the one that should come."""
        if frame.seq != self._wanted:
            raise FrameError(f"frame {frame.seq} where {self._wanted} should come")
        cost = _cost(frame)
        if self._waiting and self._waiting_bytes + cost > WINDOW:
            raise FrameError("more than the window allows")
        self._wanted += 1
        self._waiting.append((cost, frame))
        self._waiting_bytes += cost
        self._changed.set()

    async def receive(self) -> Numbered:
        """The next frame. What was received is given out before a failure is raised."""
        while not self._waiting:
            await self._change()
        return self._waiting[0][1]

    def consumed(self, *, now: bool = False) -> None:
        """The frame that `receive` gave is dealt with. `now` says so at once, and not only every so many bytes."""
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
    def wanted(self) -> int:
        """The number of the frame that should come next."""
        return self._wanted

    def resume(self, wanted: int) -> None:
        """On a new link: sends again what the other side has not received, and what was consumed meanwhile."""
        if wanted > self._next:
            raise FrameError(f"frame {wanted} is wanted where {self._next} were sent")
        for number, _, packed in self._kept:
            if number >= wanted:
                self._out(packed)
        if self._consumed:
            self._acknowledge()

    def fail(self, failure: Exception) -> None:
        """Ends the call on this side: whoever waits in `send`, `drained` or `receive` gets `failure`."""
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
    """What was read, in parts that a frame may carry."""
    for start in range(0, len(data), MAX_CHUNK):
        yield data[start : start + MAX_CHUNK]
