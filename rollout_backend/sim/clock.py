"""An event loop in which no time passes but that which somebody waits for.

What must always hold: nothing in it touches a file or a socket; timers fire in the order of their times; when all
wait and no timer is set, nothing can ever happen again, and `Deadlock` says so.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class Deadlock(BaseException):
    """Every task waits for another one."""


class _NoSelector(selectors.BaseSelector):
    """Instead of waiting for events, it moves the clock to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()  # the loop's own pipe, never used
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("everybody waits, and nobody will act")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _NoSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now
