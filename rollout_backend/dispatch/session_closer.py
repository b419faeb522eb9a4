"""Close the sessions of settled rollouts at the runtime's rate.

Invariants:

- `close` records each session in its ledger, as closed or as unclosed, before it returns;
- a failed stop that can be retried is retried for at least `retry_s`, so throttling and outages cost no session.
"""

import asyncio
import logging

from tenacity import RetryCallState, wait_exponential_jitter
from tenacity.wait import WaitBaseT

from rollout_backend.core.ledger import Ledger
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.errors import (
    NoCredentials,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)
from rollout_backend.retry import retry
from rollout_backend.runtimes.base import SessionCalls

log = logging.getLogger(__name__)

_PAUSE = wait_exponential_jitter(multiplier=0.2, max=10, jitter=0.5)
# A stop may be repeated without harm.
_RETRYABLE = (
    Throttled, QuotaExceeded, RuntimeConflict, RuntimeUnavailable, NoCredentials, WrongClock, OutcomeUnknown,
)  # fmt: skip
_LEAST_TRIES = 8  # so that a long queue of stops is not mistaken for a long outage


class SessionCloser:
    def __init__(
        self, runtime: SessionCalls, calls: CallQueue, *, retry_s: float = 180.0, wait: WaitBaseT = _PAUSE
    ) -> None:
        """`retry_s` counts from a session's first stop that failed; `wait` is the pause between two tries."""
        self._runtime = runtime
        self._calls = calls
        self._retry_s = retry_s
        self._wait = wait

    async def close(self, session_id: str, ledger: Ledger, call: CallKind = CallKind.STOP) -> bool:
        """Return whether the session is closed; if not, the ledger names it as unclosed."""
        now = asyncio.get_running_loop().time
        failed_at: float | None = None

        def enough(state: RetryCallState) -> bool:
            nonlocal failed_at
            failed_at = now() if failed_at is None else failed_at
            return state.attempt_number >= _LEAST_TRIES and now() - failed_at >= self._retry_s

        try:
            await retry(lambda: self.stop_once(session_id, ledger, call), _RETRYABLE, self._wait, stop=enough)
        except RuntimeCallError as error:
            log.warning("session %s would not close: %s", session_id, error)
            ledger.session_unclosed(session_id, str(error))
            return False
        ledger.session_closed(session_id)
        return True

    async def stop_once(self, session_id: str, ledger: Ledger, call: CallKind) -> None:
        """Send one stop, when it is its turn. Raises RuntimeCallError."""
        await self._calls.admit(call)
        with self._calls.track(call, ledger.stops):
            await self._runtime.stop(session_id)
