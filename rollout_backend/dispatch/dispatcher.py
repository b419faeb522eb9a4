"""From a planned rollout to an agent that has accepted it.

What must always hold:

- each attempt has a session id of its own, which is never used again: after a stop, an invoke with an old id would
  start a fresh machine. The id is known before the attempt (see `manifest`), so that no session is ever forgotten;
- what an attempt's session says once the attempt is given up does not settle its rollout;
- a rollout that cannot be submitted is settled at once, with the reason, and never waited for;
- a session that may have been opened is closed; one that surely was not is not.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)
from tenacity.wait import WaitBaseT

from agent_wrapper.contract import Outcome
from rollout_backend.dispatch.limiter import TokenBucket
from rollout_backend.dispatch.runtime import AgentRuntime
from rollout_backend.errors import (
    OutcomeUnknown,
    QuotaExceeded,
    Rejected,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    Unsigned,
)
from rollout_backend.ledger import Ledger

log = logging.getLogger(__name__)

_PAUSE = wait_exponential_jitter(multiplier=0.5, max=20, jitter=1.0)
_AGAIN = (Throttled, QuotaExceeded, RuntimeConflict, RuntimeUnavailable, Unsigned, OutcomeUnknown)
_ACCEPTED = frozenset({"accepted", "running", "finished"})


@dataclass(frozen=True)
class Submission:
    """One attempt that is about to be made."""

    session_id: str
    payload: bytes
    deadline: float  # loop seconds after which nothing can come of it


class Dispatcher:
    """Submits rollouts of any number of steps, within the runtime's rate and number of sessions.

    `slots` is held from a rollout's submission until its session is closed.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        *,
        per_s: float,
        max_sessions: int,
        max_attempts: int,
        wait: WaitBaseT = _PAUSE,
    ) -> None:
        """`wait` is the pause between two attempts."""
        self._runtime = runtime
        self._limiter = TokenBucket(per_s, burst=max(1.0, per_s))
        self._max_attempts = max_attempts
        self._wait = wait
        self.slots = asyncio.Semaphore(max_sessions)

    async def submit(
        self,
        rollout_id: str,
        ledger: Ledger,
        prepare: Callable[[int], Submission],
        close: Callable[[str], Awaitable[None]],
    ) -> bool:
        """Makes attempts until the agent has accepted the rollout, or it is settled.

        Called with a slot held. `prepare` makes the request of the first, second, ... attempt. `close` ends the
        session of an attempt that failed, and sees it through even if its caller is cancelled. True if the agent
        runs: then the session is the caller's to close.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_AGAIN),
            stop=stop_after_attempt(self._max_attempts),
            wait=self._wait,
            before_sleep=_log_retry(rollout_id),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._attempt(rollout_id, ledger, prepare, close)
        except RuntimeCallError as error:
            ledger.settle(rollout_id, Outcome.INFRA_ERROR, error.reason, str(error))
        return False

    async def _attempt(
        self,
        rollout_id: str,
        ledger: Ledger,
        prepare: Callable[[int], Submission],
        close: Callable[[str], Awaitable[None]],
    ) -> bool:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._limiter.reserve(loop.time()))
        if not ledger.wants(rollout_id):
            return False  # settled while it waited
        submission = prepare(ledger.entries[rollout_id].attempts + 1)
        session_id = submission.session_id
        ledger.attempt(rollout_id, session_id, submission.deadline)
        try:
            _check_accepted(await self._runtime.invoke(session_id, submission.payload))
        except RuntimeCallError as error:
            ledger.give_up(rollout_id)
            if isinstance(error, Throttled):
                self._limiter.pause(loop.time(), 1.0)
            if error.never_opened:
                ledger.session_closed(session_id)
            else:
                await close(session_id)
            raise
        except BaseException:  # cancelled in mid-call: the session may have started
            await close(session_id)
            raise
        ledger.accept(rollout_id)
        return True


def _check_accepted(body: bytes) -> None:
    try:
        status = json.loads(body)["status"]
    except (ValueError, KeyError, TypeError):
        status = None
    if status not in _ACCEPTED:
        raise Rejected(
            f"the agent answered {body[:200]!r} instead of accepting the rollout: is its function wrapped in "
            "RolloutApp, and the deployed image the current one?",
            reason="not_a_rollout_app",
        )


def _log_retry(rollout_id: str) -> Callable[[RetryCallState], None]:
    def write(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0.0
        log.warning("rollout %s, attempt %d: %s; again in %.1f s", rollout_id, state.attempt_number, error, wait)

    return write
