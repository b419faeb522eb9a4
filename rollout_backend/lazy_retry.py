"""Retry with tenacity at the cost of a plain call, as long as it succeeds.

Setting up and running an `AsyncRetrying` takes 50 to 100 us, which is more than many of the calls that it repeats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying

_T = TypeVar("_T")


async def retry(call: Callable[[], Awaitable[_T]], retrying: Callable[[], AsyncRetrying]) -> _T:
    """Return what `call` returns. If it raises, let what `retrying` returns continue: this was its first attempt."""
    try:
        return await call()
    except Exception as error:  # `retrying` decides
        first: Exception | None = error

    async def again() -> _T:
        nonlocal first
        if first is not None:
            error, first = first, None
            raise error
        return await call()

    return await retrying()(again)
