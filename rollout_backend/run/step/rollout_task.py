"""Run one rollout of a step, from its slot to its closed session.

Invariants:

- a rollout holds a slot of the runtime from its first invoke until its session is closed;
- no attempt is dispatched before the manifest in S3 names the rollout and allows the attempt;
- each attempt has a new session id, which is never reused: after a stop, an invoke with an old id would start a new
  container. The id is known before the attempt (see `manifest`), so no open session is lost;
- a refusal is not an attempt: the same session is invoked again until the rollout's deadline. An attempt counts
  towards `runtime.max_attempts` only if its session may be open. A request that cannot be signed counts as refused;
- a rejection is permanent after it repeats: over all attempts, or in as many invokes of one that opened no session;
- the next attempt starts only after the current one is abandoned. A session that may be open is always closed; a
  session that was never opened is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from tenacity import RetryCallState

from agent_wrapper.contract import Failure, Outcome, Rollout
from rollout_backend.base.logs import bind_log_fields
from rollout_backend.base.retry import at, log_retry, retry
from rollout_backend.core.ledger import (
    CONTAINER_LOST,
    MODEL_UNREACHABLE,
    NO_RESULT,
    STORE_UNAVAILABLE,
    TERMINATED,
    Ledger,
    LedgerEntry,
    Phase,
)
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.policy import GroupState, Stragglers
from rollout_backend.core.reasons import outcome_without_result
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    LeaseUnconfirmed,
    OutcomeUnknown,
    RolloutBackendError,
    RuntimeCallError,
    RuntimeUnavailable,
    StoreError,
)
from rollout_backend.run.dispatch.call_queue import CallKind, Slot
from rollout_backend.run.step.early_end import EarlyEnd
from rollout_backend.run.step.in_flight import InFlightAttempt
from rollout_backend.run.step.plan import StepPlan
from rollout_backend.run.step.services import StepServices
from rollout_backend.run.step.sessions import StepSessions

log = logging.getLogger(__name__)

_RETRYABLE = (RuntimeUnavailable, OutcomeUnknown, ContainerStartTimeout, InvokeRejected)
# A policy, a role or a token may be replaced between attempts. With the pauses, this spans three minutes.
_LEAST_REJECTIONS = 5


class StepContext:
    """State shared by the rollouts of one step."""

    def __init__(self, request: StepRequest, services: StepServices, groups: Mapping[str, GroupState]) -> None:
        self.request = request
        self.services = services
        self.early_end = EarlyEnd()
        self.ledger = Ledger(request.step, groups, services.wall, lambda: asyncio.get_running_loop().time())
        self.plan = StepPlan(request, services)
        self.sessions = StepSessions(services, self.ledger, self.early_end)
        self.stragglers = Stragglers(services.config.group, self.ledger.running)
        self.changed = asyncio.Event()


class RolloutTask:
    """Runs one rollout. Its state is its entry in the ledger."""

    def __init__(self, entry: LedgerEntry, task: Task, context: StepContext) -> None:
        self.entry = entry
        self.rollout_id = entry.rollout_id
        self.result: Rollout | None = None
        self.running: asyncio.Task[None] | None = None
        self.scoring: asyncio.Task[None] | None = None
        self.task = task
        self.context = context
        self._services = context.services
        self._slot = Slot(context.services.dispatcher.calls, task.priority)
        self._attempt_over = asyncio.Event()

    # --- start and run ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the rollout in the background, unless its result has arrived or it is already running."""
        if self.entry.outcome is None and self.scoring is None and self.running is None:
            self._run_in_background(self.run())

    def start_once_recorded(self) -> None:
        """Run the rollout in the background after the manifest that names it is in S3."""
        self._run_in_background(self.run_once_recorded())

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self.running = asyncio.create_task(work)
        self.running.add_done_callback(self.context.early_end.abort_on_failure)

    async def run_once_recorded(self) -> None:
        """Run the rollout after the manifest that names it is in S3."""
        try:
            await self.context.plan.retry(self.context.plan.record)
        # The step's deadline settles the rollout as not started.
        except StoreError:
            return
        # No retry helps, and the step does not await this task.
        except RolloutBackendError as error:
            self.context.early_end.abort(error)
            return
        await self.run()

    async def run(self) -> None:
        """Make attempts until one has a result, and close its session."""
        bind_log_fields(rollout=self.rollout_id)
        with self._services.runtime.hold(self.task.payload):
            if not self.entry.adopted:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._invoke_until):
                        await self._services.runtime.wait_ready(self.task.payload, self.context.plan.manifest.run_id)
            with self._slot:
                if self.entry.session_id is not None:
                    self._slot.take()
                while self.entry.session_id is not None or await self.dispatch():
                    while self.entry.phase is Phase.RUNNING:
                        self._attempt_over.clear()
                        await self._attempt_over.wait()
                    if (session_id := self.entry.session_id) is not None:
                        await self.context.sessions.close(session_id)
                        break
        self.context.changed.set()

    @property
    def _invoke_until(self) -> float:
        """Return the time until which a refused invoke is retried, in loop seconds."""
        return self.context.plan.deadline - self._services.config.timeouts.publish_grace_s

    # --- attempts -----------------------------------------------------------------------------------------

    async def dispatch(self) -> bool:
        """Make attempts until an agent runs. Return False if the rollout is settled or the step ends first."""
        most, rejections = self._services.config.runtime.max_attempts, 0

        def may_pass(error: BaseException) -> bool:
            final = _refused(error) or (isinstance(error, InvokeRejected) and error.final)
            return isinstance(error, _RETRYABLE) and not final and self.entry.awaits_result

        def is_last(state: RetryCallState) -> bool:
            nonlocal rejections
            error = state.outcome.exception() if state.outcome is not None else None
            if not isinstance(error, InvokeRejected) or not error.never_opened:
                rejections = 0
                return self.entry.attempts >= most
            rejections += 1
            return rejections >= max(most, _LEAST_REJECTIONS)

        try:
            return await retry(
                self._attempt,
                may_pass,
                self._services.pauses.attempt,
                stop=is_last,
                before_sleep=log_retry(log, "rollout %s", self.rollout_id),
            )
        # The step's deadline settles the rollout as not started.
        except (StoreError, LeaseUnconfirmed):
            pass
        except RuntimeCallError as error:
            if self.entry.awaits_result:
                self.entry.settle(outcome_without_result(error.reason), error.reason, str(error))
        except RolloutBackendError as error:
            self.context.early_end.abort(error)
        return False

    async def _attempt(self) -> bool:
        """Invoke a new session, and retry while the runtime refuses it. Close the session unless its agent runs."""
        manifest = self.context.plan.manifest
        attempt = manifest.attempts_before + self.entry.attempts + 1
        session_id = manifest.session_id(self.rollout_id, attempt)
        accepted = False
        try:
            accepted = await retry(
                lambda: self._invoke(attempt, session_id),
                _refused,
                self._services.pauses.refusal,
                stop=at(self._invoke_until),
                before_sleep=log_retry(log, "the invoke of rollout %s", self.rollout_id, level=logging.INFO),
            )
        finally:
            if not accepted and session_id in self.context.ledger.open_sessions:
                await self.context.sessions.close(session_id)
        return accepted

    async def _invoke(self, attempt: int, session_id: str) -> bool:
        """Invoke the session once. Return False if the rollout no longer needs an agent.

        Raises:
            RuntimeCallError: no agent runs, or it is unknown whether one does.
            StoreError: until the step's deadline, S3 refused to record one more attempt.
        """
        context, ledger, dispatcher = self.context, self.context.ledger, self._services.dispatcher
        await self._slot.admit_invoke()
        if not self.entry.awaits_result:
            return False
        with dispatcher.calls.track(CallKind.INVOKE, ledger.invokes):
            await context.plan.allow_attempt(self.entry.attempts + 1)
            claims = self._claims(attempt, session_id)
            presigner = self._services.presigner
            urls = await presigner.urls(claims) if presigner is not None else None
            report_log = context.plan.report_log
            if not await context.sessions.register(session_id, report_log, lambda: self.entry.awaits_result):
                return False
            bind_log_fields(session=session_id)
            times, now = self._services.config.timeouts, asyncio.get_running_loop().time()
            agent_s = min(times.agent_s, self.task.agent_s or times.agent_s)
            agent_s = min(agent_s, max(0.0, context.plan.deadline - times.publish_grace_s - now))
            payload = self._services.payload(self.task, claims, agent_s, urls)
            # An earlier invoke that was refused may have opened the session.
            may_be_open = session_id in ledger.open_sessions
            self.entry.start_attempt(session_id, attempt, now + agent_s + times.publish_grace_s)
            context.changed.set()
            try:
                await dispatcher.submit(session_id, payload)
            except RuntimeCallError as error:
                if error.refused or (error.never_opened and isinstance(error, InvokeRejected) and not error.final):
                    self.entry.refuse_attempt()
                else:
                    self.entry.abandon_attempt()
                if error.never_opened and not may_be_open:
                    ledger.session_never_opened(self.rollout_id, session_id)
                    if isinstance(error, LeaseUnconfirmed):
                        context.sessions.withdraw(session_id)
                raise
        self.entry.accept()
        if self.entry.phase is Phase.RUNNING:
            await self._watch_agent()
        return True

    def _claims(self, attempt: int, session_id: str) -> SessionClaims:
        config, request = self._services.config, self.context.request
        return SessionClaims(
            run_id=self.context.plan.manifest.run_id,
            step=request.step,
            rollout_id=self.rollout_id,
            attempt=attempt,
            session_id=session_id,
            sampling=self.task.sampling or request.sampling,
            expires_at=self._services.wall() + config.timeouts.session_key_s,
            routing_key=f"{request.step}/{self.task.task_id}" if config.router.affinity == "group" else "",
            adapter=request.adapter,
        )

    async def _watch_agent(self) -> None:
        """Record an agent that has accepted the rollout, and watch it."""
        entry, to_wall = self.entry, -self._wall_to_loop()
        assert entry.session_id is not None
        assert entry.began is not None
        assert entry.deadline is not None
        attempt = InFlightAttempt(
            session_id=entry.session_id,
            rollout_id=self.rollout_id,
            attempt=entry.attempt,
            began=entry.began + to_wall,
            deadline=entry.deadline + to_wall,
        )
        self._services.heartbeats.expect(entry.session_id)
        self.watch_time()
        self._services.session_ends.watch(entry.session_id, self._on_session_end)
        await self._services.in_flight.record_running(self.context.request.step, attempt)

    def _on_session_end(self, end: SessionEnd) -> None:
        self.entry.end_session(end)
        self.context.changed.set()

    def adopt(self, attempt: InFlightAttempt) -> None:
        """Make the attempt of an earlier trainer the current one, unless the rollout is settled."""
        deadline = attempt.deadline + self._wall_to_loop()
        self.entry.adopt(attempt.session_id, attempt.attempt, attempt.began, deadline)

    def start_adopted(self) -> None:
        """Wait for the result of the adopted attempt in the background."""
        entry = self.entry
        assert entry.session_id is not None
        assert entry.deadline is not None
        entry.keep_adopted()
        self._services.dispatcher.adopt(entry.session_id, self._adopted_payload)
        self.watch_time()
        self.start()
        self._services.session_ends.watch(entry.session_id, self._on_session_end)

    def _adopted_payload(self) -> bytes:
        entry = self.entry
        assert entry.session_id is not None
        assert entry.deadline is not None
        remaining_s = max(0.0, entry.deadline - asyncio.get_running_loop().time())
        return self._services.payload(self.task, self._claims(entry.attempt, entry.session_id), remaining_s)

    def _wall_to_loop(self) -> float:
        return asyncio.get_running_loop().time() - self._services.wall()

    # --- deadline -----------------------------------------------------------------------------------------

    def watch_time(self) -> None:
        """Let the step detect when the rollout is overdue or a straggler. Call again after an absence check that did
        not settle it."""
        self.context.ledger.watch(self.entry)
        if self.entry.phase is Phase.RUNNING and self.entry.began is not None:
            self.context.stragglers.started(self.rollout_id, self.entry.began)
            self.context.changed.set()

    # --- settlement ---------------------------------------------------------------------------------------

    def settle(self, outcome: Outcome, reason: str, message: str = "") -> None:
        """Settle the rollout without a result. Allowed in any phase."""
        invoking = self.entry.phase is Phase.DISPATCHING
        if not self.entry.settle(outcome, reason, message):
            return
        if self.scoring is not None and self.scoring is not asyncio.current_task():
            self.scoring.cancel()
        self._mark_settled()
        if invoking and self.running is not None:
            self.running.cancel()

    def start_scoring(self, rollout: Rollout, work: Coroutine[Any, Any, None]) -> None:
        """Await the score of a result in the background, while its session is closed."""
        self.entry.start_scoring(rollout.session_id)
        self._end_attempt()
        self.scoring = asyncio.create_task(work)
        self.scoring.add_done_callback(self.context.early_end.abort_on_failure)

    def settle_with(self, rollout: Rollout) -> None:
        """Settle the rollout by its result."""
        self.result, failure = rollout, rollout.failure
        self.entry.deliver(
            rollout.outcome,
            failure.reason if failure else "",
            failure.message if failure else "",
            session_id=rollout.session_id,
            trainable=rollout.trainable,
        )
        self._mark_settled()

    def settle_as_invalid(self, message: str) -> None:
        """Settle the rollout by a result that was refused."""
        if self.entry.deliver(Outcome.INFRA_ERROR, "invalid_result", message):
            self._mark_settled()

    def _mark_settled(self) -> None:
        self._end_attempt()
        if self.entry.took is not None and self.entry.delivered:
            self.context.stragglers.delivered(self.entry.took)

    def _end_attempt(self) -> None:
        self._attempt_over.set()
        # Without a session, the task waits for a slot or for the next attempt.
        if self.entry.session_id is None and self.running is not None:
            self.running.cancel()
        self.context.changed.set()

    # --- lost attempts, after S3 has confirmed that there is no result ------------------------------------

    def on_overdue(self) -> None:
        """Retry or settle the rollout after its session has ended, or its deadline has passed."""
        if self.entry.due_at is None or self.entry.due_at > asyncio.get_running_loop().time():
            # During the check, the invoke was accepted or retried, which moves the deadline.
            return
        if (end := self.entry.session_end) is not None:
            self._lose_session(end.reason, end.message, final=end.final)
            return
        message = (
            f"nothing was published within {self._services.config.timeouts.publish_grace_s:g} s of the agent's "
            f"deadline; check the log of session {self.entry.session_id} for the cause"
        )
        if self.entry.adopted:
            self._lose_session(NO_RESULT, message)
        else:
            self.settle(Outcome.TIMED_OUT, NO_RESULT, message)

    def on_container_lost(self) -> None:
        """Retry after the container died silently, or settle the rollout if no attempt is left."""
        if self.entry.session_id not in self._services.heartbeats.lost_sessions:
            # A heartbeat arrived during the check.
            return
        message = (
            f"session {self.entry.session_id} stopped sending heartbeats while other sessions sent them: its "
            "container or its network has failed. The session's log may say why"
        )
        self._lose_session(CONTAINER_LOST, message)

    def retry_lost(self, failure: Failure | None) -> bool:
        """Retry after a failure marker if another attempt may succeed. Return False if the marker counts."""
        reason = TERMINATED if failure is None else failure.reason
        # A gateway that agents have reached may take long to restart. Without one, the address is probably wrong.
        may_pass = reason == TERMINATED or (reason == MODEL_UNREACHABLE and self._services.heartbeats.any_arrived)
        if not self.entry.adopted and not (may_pass and self.entry.phase is Phase.RUNNING and self._has_attempts):
            return False
        self._lose_session(reason, "" if failure is None else failure.message)
        return True

    @property
    def _has_attempts(self) -> bool:
        return self.entry.attempts < self._services.config.runtime.max_attempts

    def _lose_session(self, reason: str, message: str, *, final: bool = False) -> None:
        """Retry if an attempt is left or an earlier trainer made the lost one. Otherwise settle the rollout."""
        if self.entry.adopted:
            log.info("rollout %s: the attempt of an earlier trainer is lost; retrying", self.rollout_id)
            self.abandon_attempt()
            self.context.changed.set()
        elif self._has_attempts and not final:
            log.warning("rollout %s, attempt %d: %s; retrying", self.rollout_id, self.entry.attempts, message)
            self.abandon_attempt()
        else:
            self.settle(outcome_without_result(reason), reason, message)

    def settle_straggler(self) -> None:
        """Settle a straggler."""
        assert self.entry.began is not None
        ran = asyncio.get_running_loop().time() - self.entry.began
        message = (
            f"it ran for {ran:.0f} s, more than {self._services.config.group.straggler_factor:g} times as long as "
            "95 % of the step's finished rollouts (settings: group.straggler_after, group.straggler_factor)"
        )
        self.settle(Outcome.TIMED_OUT, "straggler", message)

    def reach_step_deadline(self, answered: bool = True) -> None:
        """Settle the rollout at the step's deadline. `answered` is True if the absence of a result is confirmed."""
        if self.entry.phase is not Phase.RUNNING:
            self.settle(Outcome.CANCELLED, "not_started", "the step's time was up before its agent ran")
        elif answered:
            self.settle(Outcome.TIMED_OUT, "collection_deadline", "the step's time was up")
        else:
            where = "S3" if self._services.dispatcher.source is None else "S3, or what holds the agent's result,"
            message = f"the step's time was up, and {where} could not be asked whether its result is there"
            self.settle(Outcome.TIMED_OUT, STORE_UNAVAILABLE, message)

    def abandon_attempt(self) -> None:
        """Close the session of the current attempt in the background, and make the next attempt."""
        session_id = self.entry.session_id
        assert session_id is not None
        self.entry.abandon_attempt()
        self._attempt_over.set()
        self.context.sessions.close_later(session_id)


def _refused(error: BaseException) -> bool:
    return isinstance(error, RuntimeCallError) and error.refused
