"""Variants that reuse, lose or leave open sessions, or do not notice that one has died."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from rollout_backend.core.ledger import Ledger
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.session_ends import Heartbeats
from rollout_backend.errors import (
    NoCredentials,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.dispatch.call_queue import CallKind
from rollout_backend.run.dispatch.dispatcher import Dispatcher
from rollout_backend.run.step.rollout_task import RolloutTask
from rollout_backend.run.step.sessions import StepSessions
from rollout_backend.run.step.step import Step
from tests.simulation.mutants.registry import Patch, all_of, mutant


@mutant
def session_ids_reused() -> Patch:
    """All attempts of a rollout use one session id."""

    def broken(self: Manifest, rollout_id: str, attempt: int) -> str:
        return f"session-of-{rollout_id}-{self.nonce}"

    return patch.object(Manifest, "session_id", broken)


@mutant
def failed_attempts_left_open() -> Patch:
    """A session whose invoke got no response counts as never opened."""
    return patch.object(OutcomeUnknown, "never_opened", True)


@mutant
def refusals_are_attempts() -> Patch:
    """A throttled invoke counts as a failed attempt."""
    return all_of(*(patch.object(kind, "refused", False) for kind in (Throttled, QuotaExceeded)))


@mutant
def unsigned_calls_are_attempts() -> Patch:
    """An invoke that could not be signed counts as a failed attempt."""
    return patch.object(NoCredentials, "refused", False)


@mutant
def wrong_clocks_reject() -> Patch:
    """An invoke that AWS refuses because of the trainer's clock ends its rollout."""
    return patch.object(WrongClock, "refused", False)


@mutant
def refused_sessions_left_open() -> Patch:
    """A 503 counts as proof that no session was opened."""
    make = RuntimeUnavailable.__init__

    def broken(self: RuntimeUnavailable, message: str, *, refused: bool = False, never_opened: bool = False) -> None:
        make(self, message, never_opened=refused or never_opened)

    return patch.object(RuntimeUnavailable, "__init__", broken)


@mutant
def stops_abandoned_in_an_outage() -> Patch:
    """A stop is abandoned after eight tries, even within an outage."""
    make = Dispatcher.__init__

    def broken(self: Dispatcher, *args: Any, **more: Any) -> None:
        make(self, *args, **{**more, "stop_retry_s": 0.0})

    return patch.object(Dispatcher, "__init__", broken)


@mutant
def stops_not_retried() -> Patch:
    """A refused stop is not retried and counts as done."""

    async def broken(self: Dispatcher, session_id: str, ledger: Ledger, call: CallKind = CallKind.STOP) -> bool:
        with contextlib.suppress(Exception):
            await self.stop_once(session_id, ledger, call)
        ledger.session_closed(session_id)
        return True

    return patch.object(Dispatcher, "close", broken)


@mutant
def stopped_steps_leave_sessions_open() -> Patch:
    """A step that the circuit breaker ends does not close its running sessions."""
    run = Step.run

    async def broken(self: Step) -> StepResult:
        abort = self.early_end.abort

        def leave_open(error: BaseException) -> None:
            for task in self.rollouts.values():
                if task.running is not None:
                    task.running.cancel()
            self.ledger.open_sessions.clear()
            abort(error)

        with patch.object(self.early_end, "abort", leave_open):
            return await run(self)

    return patch.object(Step, "run", broken)


@mutant
def keys_revoked_with_the_step() -> Patch:
    """An agent that a stop does not reach keeps sampling until its step ends."""

    async def broken(self: StepSessions, session_id: str, call: CallKind = CallKind.STOP) -> None:
        await self.services.in_flight.record_closed(self.ledger.step, session_id)
        await self.services.dispatcher.close(session_id, self.ledger, call)

    return patch.object(StepSessions, "stop", broken)


@mutant
def silent_deaths_unnoticed() -> Patch:
    """A container that died silently is awaited until its agent's deadline."""
    return patch.object(Heartbeats, "lost_sessions", set())


@mutant
def heartbeats_forgotten_at_a_repeated_invoke() -> Patch:
    """A container that dies at a repeated invoke is awaited until its agent's deadline."""
    return patch.object(Heartbeats, "expect", lambda *_: None)


@mutant
def unreached_gateways_end_rollouts() -> Patch:
    """An agent that does not reach its gateway in time ends its rollout, although others have reached it."""
    never = property(lambda self: False, lambda self, value: None)
    return patch.object(Heartbeats, "any_arrived", never, create=True)


@mutant
def outages_count_as_silence() -> Patch:
    """Silence also counts while no session is heard: a one-minute network outage loses every agent."""
    init = Heartbeats.__init__

    def broken(self: Heartbeats, every_s: float, gateways: int = 1, *, same_machine: bool = False) -> None:
        init(self, every_s, gateways, same_machine=True)

    return patch.object(Heartbeats, "__init__", broken)


@mutant
def lost_attempts_left_open() -> Patch:
    """The session of an attempt whose container was lost is not stopped."""
    abandon_attempt = RolloutTask.abandon_attempt

    def broken(self: RolloutTask) -> None:
        session_id = self.entry.session_id or ""
        with patch.object(StepSessions, "close_later", lambda *_: None):
            abandon_attempt(self)
        self.context.ledger.session_closed(session_id)

    return patch.object(RolloutTask, "abandon_attempt", broken)
