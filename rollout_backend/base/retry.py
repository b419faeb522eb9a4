"""Retry calls with the waits and stops of tenacity, but without its loop.

tenacity's `AsyncRetrying` takes 50 to 100 us, even for a call that succeeds immediately, and many calls take less. It
also leaves a reference cycle, which keeps what the call refers to, such as a step's results, until a garbage
collection.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from tenacity import AsyncRetrying, RetryAction, RetryCallState, stop_never
from tenacity.stop import StopBaseT
from tenacity.wait import WaitBaseT

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ERROR_CHARS = 2_000
_E = TypeVar("_E", bound=Exception)


async def retry(
    call: Callable[[], Awaitable[_T]],
    on: type[Exception] | tuple[type[Exception], ...] | Callable[[BaseException], bool],
    wait: WaitBaseT,
    *,
    stop: StopBaseT = stop_never,
    before_sleep: Callable[[RetryCallState], None] | None = None,
) -> _T:
    """Return what `call` returns. Repeat it after errors of these types, or for which `on` returns true.

    The last error is raised once `stop` ends the retries. By default they do not end. To end them at a time, even
    while `call` gets no answer, use `retry_until`.
    """
    state: RetryCallState | None = None
    while True:
        try:
            return await call()
        except Exception as error:
            if not (isinstance(error, on) if isinstance(on, (type, tuple)) else on(error)):
                raise
            state = state or RetryCallState(AsyncRetrying(), None, (), {})
            state.set_exception((type(error), error, error.__traceback__))
            try:
                pause_s = state.upcoming_sleep = wait(state)
                if stop(state):
                    raise
                state.next_action = RetryAction(pause_s)
                state.idle_for += pause_s
                if before_sleep is not None:
                    before_sleep(state)
            finally:
                # The error's traceback refers to this frame, and so to the state.
                state.outcome = None
        state.prepare_for_next_attempt()
        await asyncio.sleep(pause_s)


async def retry_until(
    until: float,
    call: Callable[[], Awaitable[_T]],
    on: type[_E],
    wait: WaitBaseT,
    *,
    before_sleep: Callable[[RetryCallState], None] | None = None,
) -> _T:
    """Return what `call` returns. Repeat it after errors of this type until the loop's time is `until`, and interrupt
    it then.

    Raises `on` at that time, with the message of the last error.
    """
    last = "no answer in time"

    async def attempt() -> _T:
        nonlocal last
        try:
            return await call()
        except on as error:
            last = str(error)
            raise

    limit = asyncio.timeout_at(None if until == math.inf else until)
    try:
        async with limit:
            return await retry(attempt, on, wait, before_sleep=before_sleep)
    except TimeoutError:
        if not limit.expired():
            raise
        raise on(last) from None


async def repeat(work: Callable[[], Awaitable[object]], what: str, pause_s: float = 5.0) -> NoReturn:
    """Call `work` again whenever it ends, and log each failure. Use it for background work that must not end."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed; it is repeated", what)
        await asyncio.sleep(pause_s)


def at(until: float) -> Callable[[RetryCallState], bool]:
    """Stop the retries once the loop's time is `until`."""
    return lambda _: asyncio.get_running_loop().time() >= until


def log_retry(log: logging.Logger, what: str, *args: object, level: int = logging.WARNING) -> Callable[..., None]:
    """Log each retry before its pause, with the error. `what` names the call, with `args` for its placeholders."""

    def write(state: RetryCallState) -> None:
        # The text alone: a kept record would keep the error's traceback.
        error = str(state.outcome.exception())[:_ERROR_CHARS] if state.outcome else ""
        pause = state.next_action.sleep if state.next_action else 0.0
        log.log(level, f"{what}, attempt %d: %s; retrying in %.1f s", *args, state.attempt_number, error, pause)

    return write
