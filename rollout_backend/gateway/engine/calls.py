"""Pause all calls to engines while a trainer uses their memory.

Invariant: once `pause` has returned, no request to an engine is in flight, and none begins before `resume`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class CallsPaused(Exception):
    """Raised when a pause interrupts a call."""


class EngineCalls:
    """The calls from one gateway process to its engines."""

    def __init__(self, *, paused: bool = False) -> None:
        self._resumed = asyncio.Event()
        if not paused:
            self._resumed.set()
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    def resume(self) -> None:
        self._resumed.set()

    async def pause(self) -> None:
        """Cancel all requests to engines, and return when they have ended."""
        self._resumed.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def wait(self) -> None:
        """Wait until calls are not paused."""
        await self._resumed.wait()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and return its result.

        Raises:
            CallsPaused: calls are paused, or were paused while `work` ran; `work` was cancelled.
        """
        if self.paused:
            work.close()
            raise CallsPaused
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise CallsPaused from None
