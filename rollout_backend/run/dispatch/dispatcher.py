"""Start and stop the sessions of a run, within the runtime's rates and number of sessions.

Invariants:

- an invoke is sent only after `calls` has admitted it;
- a response other than the wrapper's acceptance is an error: no agent runs;
- `close` records each session in its ledger, as closed or as unclosed, before it returns;
- a failed stop that can be retried is retried for at least `stop_retry_s`, so throttling and outages cost no session.

Which attempts are made, and what becomes of their sessions: see `step.rollout_task`.
"""

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import RetryCallState, wait_exponential_jitter
from tenacity.wait import WaitBaseT

from rollout_backend.agents.runtimes.base import ResultSource, SessionCalls
from rollout_backend.base.retry import retry
from rollout_backend.core.ledger import Ledger
from rollout_backend.errors import (
    InvokeRejected,
    LeaseUnconfirmed,
    NoCredentials,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)
from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_ACCEPTED = frozenset({"accepted", "running", "finished"})
_STOP_PAUSE = wait_exponential_jitter(multiplier=0.2, max=10, jitter=0.5)
# A stop may be repeated without harm.
_STOP_RETRYABLE = (
    Throttled, QuotaExceeded, RuntimeConflict, RuntimeUnavailable, NoCredentials, WrongClock, OutcomeUnknown,
    LeaseUnconfirmed,
)  # fmt: skip
_SLOWEST_BYTES_PER_S = 1024**2
# A long queue of stops must not be mistaken for a long outage.
_LEAST_STOPS = 8


class TimedCalls:
    """Calls a runtime with a time limit, even if its adapter sets none."""

    def __init__(self, runtime: SessionCalls, invoke_limit_s: float, stop_limit_s: float) -> None:
        self._runtime = runtime
        self._invoke_limit_s = invoke_limit_s
        self._stop_limit_s = stop_limit_s

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        limit_s = self._invoke_limit_s + len(payload) / _SLOWEST_BYTES_PER_S
        return await self._in_time("invoke", self._runtime.invoke(session_id, payload), limit_s)

    async def stop(self, session_id: str) -> bool | None:
        return await self._in_time("stop", self._runtime.stop(session_id), self._stop_limit_s)

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:
        self._runtime.adopt(session_id, payload)

    async def _in_time(self, name: str, call: Awaitable[_T], limit_s: float) -> _T:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise OutcomeUnknown(f"the runtime's adapter did not end the {name} within {limit_s:.0f} s") from None


class Dispatcher:
    """Sends the invokes and stops of all steps of a run, at most `max_sessions` rollouts at a time."""

    def __init__(
        self,
        runtime: SessionCalls,
        calls: CallQueue,
        *,
        max_sessions: int,
        stop_retry_s: float = 180.0,
        stop_wait: WaitBaseT = _STOP_PAUSE,
    ) -> None:
        """`runtime` ends each call in time: see `TimedCalls`. A session is given up if its stops fail for
        `stop_retry_s` while the runtime closes no other one, or refuses this one for other reasons than its rate.
        `stop_wait` is the pause between tries. If `runtime` is a `ResultSource`, a rollout without a result is absent
        only after that source has answered."""
        self._runtime = runtime
        self.calls = calls
        self.source = runtime if isinstance(runtime, ResultSource) else None
        self._stop_retry_s = stop_retry_s
        self._stop_wait = stop_wait
        # When a stop last succeeded, in loop seconds.
        self._stopped_at = -math.inf
        calls.free_slots = max_sessions

    # --- invokes ------------------------------------------------------------------------------------------

    async def submit(self, session_id: str, payload: bytes) -> None:
        """Start the agent in a session. The caller must have been admitted by `calls`.

        Raises:
            RuntimeCallError: no agent runs, or nothing is known of it.
        """
        answer = await self._runtime.invoke(session_id, payload)
        try:
            accepted = json.loads(answer)["status"] in _ACCEPTED
        except (ValueError, KeyError, TypeError, RecursionError):
            # A container may return anything.
            accepted = False
        if not accepted:
            raise InvokeRejected(
                f"the agent answered {answer[:200]!r} instead of accepting the rollout: is its function wrapped in "
                "RolloutApp, or its BedrockAgentCoreApp imported from agent_wrapper.bedrock_agentcore, and the "
                "deployed image the current one?",
                reason="not_a_rollout_app",
            )

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:
        """Take over a session that an earlier trainer invoked: see `SessionCalls.adopt`."""
        self._runtime.adopt(session_id, payload)

    # --- stops --------------------------------------------------------------------------------------------

    async def close(self, session_id: str, ledger: Ledger, call: CallKind = CallKind.STOP) -> bool:
        """Return whether the session is closed; if not, the ledger names it as unclosed."""
        now = asyncio.get_running_loop().time
        failed_at: float | None = None
        own_failures = 0

        def enough(state: RetryCallState) -> bool:
            nonlocal failed_at, own_failures
            failed_at = now() if failed_at is None else failed_at
            # A runtime that throttles and still closes other sessions will close this one too.
            own_failures += state.outcome is None or not isinstance(state.outcome.exception(), Throttled)
            since = failed_at if own_failures >= _LEAST_STOPS else max(failed_at, self._stopped_at)
            return state.attempt_number >= _LEAST_STOPS and now() - since >= self._stop_retry_s

        try:
            stopped = await retry(
                lambda: self.stop_once(session_id, ledger, call), _STOP_RETRYABLE, self._stop_wait, stop=enough
            )
        except RuntimeCallError as error:
            log.warning("session %s would not close: %s", session_id, error)
            ledger.session_unclosed(session_id, str(error))
            return False
        ledger.session_closed(session_id, confirmed=stopped is not False)
        return True

    async def stop_once(self, session_id: str, ledger: Ledger, call: CallKind) -> bool | None:
        """Send one stop, when it is its turn. Returns like `SessionCalls.stop`. Raises RuntimeCallError."""
        await self.calls.admit(call)
        with self.calls.track(call, ledger.stops):
            stopped = await self._runtime.stop(session_id)
        self._stopped_at = asyncio.get_running_loop().time()
        return stopped
