"""Let callers wait for a limited number of places, which their owners get in turn.

Invariants:

- Owners take turns, and the callers of one owner are served in order. An owner with many callers delays its own.
- One owner holds at most its share of the places. A caller that wants more is served once its owner holds none.
- A cancelled caller gives up the place that it holds or waits for.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager


class FairQueue:
    """A queue for places. A caller is served while `has_room()` is true; call `serve` when that may have changed."""

    def __init__(self, share: int, has_room: Callable[[], bool] | None = None) -> None:
        """`share` is the number of places that one owner may hold. The default of `has_room` sets no other limit."""
        self._share = share
        self._has_room = has_room or (lambda: True)
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[tuple[asyncio.Future[None], int]]] = {}
        # Owners that wait and may hold more, next first.
        self._turns: dict[Hashable, None] = {}
        self.held = 0
        """Number of places that are held."""

    @property
    def waiting(self) -> int:
        """Number of callers that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, owner: Hashable, places: int = 1) -> AsyncIterator[None]:
        """Wait for this many places, and hold them within the context."""
        entry = asyncio.get_running_loop().create_future(), places
        self._waiting.setdefault(owner, deque()).append(entry)
        self._turns.setdefault(owner)
        self.serve()
        try:
            await entry[0]
        except asyncio.CancelledError:
            if not entry[0].cancelled():
                self._release(owner, places)
            elif entry in (callers := self._waiting.get(owner, deque())):
                callers.remove(entry)
                self._turns.setdefault(owner)
                self.serve()
            raise
        try:
            yield
        finally:
            self._release(owner, places)

    def serve(self) -> None:
        """Serve callers while there is room."""
        while self._turns and self._has_room():
            owner = next(iter(self._turns))
            del self._turns[owner]
            callers = self._waiting[owner]
            # The task of a cancelled caller may not have run yet.
            while callers and callers[0][0].cancelled():
                callers.popleft()
            if callers and not (self._held[owner] and self._held[owner] + callers[0][1] > self._share):
                future, places = callers.popleft()
                self._held[owner] += places
                self.held += places
                future.set_result(None)
                if callers:
                    self._turns[owner] = None
            if not callers:
                del self._waiting[owner]

    def _release(self, owner: Hashable, places: int) -> None:
        self.held -= places
        self._held[owner] -= places
        if not self._held[owner]:
            del self._held[owner]
        if owner in self._waiting:
            self._turns.setdefault(owner)
        self.serve()
