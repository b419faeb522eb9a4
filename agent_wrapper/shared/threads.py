"""Run blocking work in daemon threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], name: str) -> _T:
    """Run `work` in a thread and return its result. A cancellation abandons the thread, which does not delay the end
    of the process, unlike that of `asyncio.to_thread`."""
    future: Future[_T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
