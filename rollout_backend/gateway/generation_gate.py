"""Pause all calls to engines while a trainer uses their memory.

Invariant: once `close` has returned, no request to an engine is in flight, and none begins before `open`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class GateClosed(Exception):
    """The work was cut short because the gate closed."""


class GenerationGate:
    """The gate between one gateway process and its engines."""

    def __init__(self, is_open: bool = True) -> None:
        self._opened = asyncio.Event()
        if is_open:
            self._opened.set()
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    async def close(self) -> None:
        """Cancel all requests to engines and return when they have ended."""
        self._opened.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def wait(self) -> None:
        """Return when the gate is open."""
        await self._opened.wait()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work` returns.

        Raises:
            GateClosed: the gate is closed, or closed meanwhile; `work` was cancelled.
        """
        if not self.is_open:
            work.close()
            raise GateClosed
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise GateClosed from None
