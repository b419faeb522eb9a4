"""Retry calls with tenacity. A call that succeeds at once costs no more than without it.

Setting up and running an `AsyncRetrying` takes 50 to 100 us, which is more than many of the calls that it repeats.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, retry_if_exception_type, stop_never
from tenacity.stop import StopBaseT
from tenacity.wait import WaitBaseT

_T = TypeVar("_T")


async def retry(
    call: Callable[[], Awaitable[_T]],
    on: type[Exception] | tuple[type[Exception], ...] | Callable[[BaseException], bool],
    wait: WaitBaseT,
    *,
    stop: StopBaseT = stop_never,
    before_sleep: Callable[[RetryCallState], None] | None = None,
) -> _T:
    """Return what `call` returns. Repeat it after errors of these types, or for which `on` returns true.

    The last error is raised once `stop` ends the retries. By default they do not end.
    """
    try:
        return await call()
    except Exception as error:
        first: Exception | None = error

    async def again() -> _T:
        nonlocal first
        if first is not None:  # the call above was the first attempt
            error, first = first, None
            raise error
        return await call()

    return await AsyncRetrying(
        retry=retry_if_exception_type(on) if isinstance(on, (type, tuple)) else retry_if_exception(on),
        wait=wait,
        stop=stop,
        before_sleep=before_sleep,
        reraise=True,
    )(again)


def at(until: float) -> Callable[[RetryCallState], bool]:
    """Stop the retries once the loop's time is `until`."""
    return lambda _: asyncio.get_running_loop().time() >= until


def log_retry(log: logging.Logger, what: str, *args: object, level: int = logging.WARNING) -> Callable[..., None]:
    """Log each retry before its pause, with the error. `what` names the call, with `args` for its placeholders."""

    def write(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        log.log(level, f"{what}, attempt %d: %s; retrying in %.1f s", *args, state.attempt_number, error, pause)

    return write
