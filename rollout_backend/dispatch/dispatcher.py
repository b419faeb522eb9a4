"""Submit planned rollouts to agents.

Invariants:

- each attempt has a new session id, which is never reused: after a stop, an invoke with an old id would start a new
  container. The id is known before the attempt (see `manifest`), so no open session is lost;
- a refusal is not an attempt: the same session is invoked again until the rollout's deadline. An attempt counts
  towards `max_attempts` only if its session may be open. A request that cannot be signed counts as refused;
- a result of an abandoned attempt does not settle its rollout;
- a rollout that cannot be submitted is settled at once, with the reason;
- a session that may be open is closed; one that was never opened is not.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tenacity import stop_after_attempt, wait_exponential_jitter
from tenacity.wait import WaitBaseT

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Ledger
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    OutcomeUnknown,
    RuntimeCallError,
    RuntimeUnavailable,
)
from rollout_backend.retry import at, log_retry, retry
from rollout_backend.runtimes.base import SessionCalls

log = logging.getLogger(__name__)

# 5, 15, 45, 135 s: the default of five attempts outlasts an outage of three minutes.
_BETWEEN_ATTEMPTS = wait_exponential_jitter(multiplier=5, exp_base=3, max=300, jitter=1.0)
# Short, for the queue paces the calls: it only keeps one rollout that conflicts from taking every turn.
_AFTER_REFUSAL = wait_exponential_jitter(multiplier=0.5, max=5, jitter=0.5)
_RETRYABLE = (RuntimeUnavailable, OutcomeUnknown, ContainerStartTimeout)
_ACCEPTED = frozenset({"accepted", "running", "finished"})


@dataclass(frozen=True)
class Submission:
    """The request of one attempt."""

    session_id: str
    payload: bytes
    deadline: float  # loop seconds after which no result can arrive


class Dispatcher:
    """Submits the rollouts of all steps of a run, within the runtime's rate and number of sessions.

    `slots` is held from a rollout's submission until its session is closed.
    """

    def __init__(
        self,
        runtime: SessionCalls,
        calls: CallQueue,
        *,
        max_sessions: int,
        max_attempts: int,
        wait: WaitBaseT = _BETWEEN_ATTEMPTS,
        wait_refused: WaitBaseT = _AFTER_REFUSAL,
    ) -> None:
        """`wait` is the back-off between attempts, `wait_refused` that between retries of a refused invoke."""
        self._runtime = runtime
        self._calls = calls
        self._max_attempts = max_attempts
        self._wait = wait
        self._wait_refused = wait_refused
        self.slots = asyncio.Semaphore(max_sessions)

    @property
    def invoke_per_s(self) -> float:
        """Return how many invokes are sent per second at most, at this moment."""
        return self._calls.invoke_per_s

    async def submit(
        self,
        rollout_id: str,
        ledger: Ledger,
        prepare: Callable[[int], Awaitable[Submission]],
        close: Callable[[str], Awaitable[None]],
        until: float,
    ) -> bool:
        """Make attempts until an agent accepts the rollout or the rollout is settled. Earlier attempts count.

        The caller holds a slot. `prepare` returns the request of the nth attempt; it is called before each invoke.
        `close` closes the session of a failed attempt, even if the caller is cancelled. Refused invokes are retried
        until the loop's time is `until`. Return True if the agent runs; then the caller must close its session.
        """
        last: Submission | None = None

        async def prepared(attempt: int) -> Submission:
            nonlocal last
            last = await prepare(attempt)
            return last

        before = ledger.entries[rollout_id].attempts
        running = False
        try:
            running = await retry(
                lambda: self._attempt(rollout_id, ledger, prepared, close, until),
                lambda error: isinstance(error, _RETRYABLE) and not _refused(error),
                self._wait,
                stop=stop_after_attempt(self._max_attempts - before),
                before_sleep=log_retry(log, "rollout %s", rollout_id),
            )
        except RuntimeCallError as error:
            if ledger.awaits_result(rollout_id):
                ledger.settle(rollout_id, Outcome.INFRA_ERROR, error.reason, str(error))
        finally:
            if not running and last is not None and last.session_id in ledger.open_sessions:
                await close(last.session_id)  # cancelled in mid-call, or refused in a way that may have opened it
        return running

    async def _attempt(
        self,
        rollout_id: str,
        ledger: Ledger,
        prepare: Callable[[int], Awaitable[Submission]],
        close: Callable[[str], Awaitable[None]],
        until: float,
    ) -> bool:
        """Make one attempt. Retry while the runtime refuses the invoke."""
        return await retry(
            lambda: self._invoke(rollout_id, ledger, prepare, close),
            _refused,
            self._wait_refused,
            stop=at(until),
            before_sleep=log_retry(log, "the invoke of rollout %s", rollout_id, level=logging.INFO),
        )

    async def _invoke(
        self,
        rollout_id: str,
        ledger: Ledger,
        prepare: Callable[[int], Awaitable[Submission]],
        close: Callable[[str], Awaitable[None]],
    ) -> bool:
        await self._calls.admit(CallKind.INVOKE)
        if not ledger.awaits_result(rollout_id):
            return False  # its result came while it waited
        session_id, may_be_open = None, False
        try:
            with self._calls.track(CallKind.INVOKE, ledger.invokes):
                submission = await prepare(ledger.entries[rollout_id].attempts + 1)
                if not ledger.awaits_result(rollout_id):
                    return False
                session_id = submission.session_id
                may_be_open = session_id in ledger.open_sessions  # by an earlier call, which was refused
                ledger.start_attempt(rollout_id, session_id, submission.deadline)
                answer = await self._runtime.invoke(session_id, submission.payload)
            _check_accepted(answer)
        except RuntimeCallError as error:
            if session_id is None:  # the request could not be signed
                raise
            if error.refused:
                ledger.undo_attempt(rollout_id)
            else:
                ledger.abandon_attempt(rollout_id)
            if error.never_opened and not may_be_open:
                ledger.session_never_opened(rollout_id, session_id)
            elif not error.refused:
                await close(session_id)
            raise
        ledger.accept(rollout_id)
        return True


def _refused(error: BaseException) -> bool:
    return isinstance(error, RuntimeCallError) and error.refused


def _check_accepted(body: bytes) -> None:
    try:
        status = json.loads(body)["status"]
    except (ValueError, KeyError, TypeError):
        status = None
    if status not in _ACCEPTED:
        raise InvokeRejected(
            f"the agent answered {body[:200]!r} instead of accepting the rollout: is its function wrapped in "
            "RolloutApp, or its BedrockAgentCoreApp imported from agent_wrapper.bedrock_agentcore, and the deployed "
            "image the current one?",
            reason="not_a_rollout_app",
        )
