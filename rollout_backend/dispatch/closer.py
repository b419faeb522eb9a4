"""Ends sessions: as soon as their rollout is settled, at the runtime's rate, until each is closed or named.

What must always hold: each session handed to `close` is booked in its ledger as closed, or as one that would not
close, before `close` returns.
"""

from __future__ import annotations

import asyncio
import logging

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter
from tenacity.wait import WaitBaseT

from rollout_backend.dispatch.limiter import TokenBucket
from rollout_backend.dispatch.runtime import AgentRuntime
from rollout_backend.errors import (
    OutcomeUnknown,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    Unsigned,
)
from rollout_backend.ledger import Ledger

log = logging.getLogger(__name__)

_PAUSE = wait_exponential_jitter(multiplier=0.2, max=10, jitter=0.5)
# A stop may be repeated without harm.
_AGAIN = (Throttled, RuntimeConflict, RuntimeUnavailable, Unsigned, OutcomeUnknown)


class SessionCloser:
    def __init__(
        self,
        runtime: AgentRuntime,
        per_s: float,
        attempts: int = 8,
        wait: WaitBaseT = _PAUSE,
    ) -> None:
        """`wait` is the pause between two attempts."""
        self._runtime = runtime
        self._limiter = TokenBucket(per_s, burst=max(1.0, per_s))
        self._attempts = attempts
        self._wait = wait

    async def close(self, session_id: str, ledger: Ledger) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_AGAIN),
            stop=stop_after_attempt(self._attempts),
            wait=self._wait,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._stop(session_id)
        except RuntimeCallError as error:
            log.warning("session %s would not close: %s", session_id, error)
            ledger.session_unclosed(session_id, str(error))
        else:
            ledger.session_closed(session_id)

    async def _stop(self, session_id: str) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._limiter.reserve(loop.time()))
        try:
            await self._runtime.stop(session_id)
        except Throttled:
            self._limiter.pause(loop.time(), 1.0)
            raise
