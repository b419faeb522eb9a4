"""Deliberately broken variants of the production code, each without one guard.

They test the simulator's checks: each variant must be caught by some seed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import random
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

from agent_wrapper.contract import ContractError, Outcome, ResultName, Rollout
from rollout_backend.collect import buffer as buffer_module
from rollout_backend.collect import fetcher as fetcher_module
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.decode import ResultDecoder
from rollout_backend.collect.fetcher import FetchStatus, KeyLocks, ResultFetcher
from rollout_backend.collect.manifest_store import ManifestStore
from rollout_backend.collect.queue import Message
from rollout_backend.core.circuit_breaker import CircuitBreaker
from rollout_backend.core.heartbeats import Heartbeats
from rollout_backend.core.ledger import Ledger, ResultStatus
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.policy import StragglerRule
from rollout_backend.core.report import GroupResult
from rollout_backend.dispatch.call_queue import CallKind
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatch.session_closer import SessionCloser
from rollout_backend.errors import QuotaExceeded, RuntimeUnavailable, Throttled
from rollout_backend.gateway import journal
from rollout_backend.observe.archive import RunArchive
from rollout_backend.run_lease import LeaseRecord, RunLease
from rollout_backend.simulation.s3 import SimStore
from rollout_backend.step import restart as restart_module
from rollout_backend.step.absence_check import AbsenceCheck
from rollout_backend.step.group import Group
from rollout_backend.step.in_flight import InFlightLog, OpenSessions
from rollout_backend.step.plan import StepPlan
from rollout_backend.step.restart import resumable_attempts
from rollout_backend.step.rollout_task import RolloutTask
from rollout_backend.step.sessions import StepSessions
from rollout_backend.step.step import Step
from rollout_backend.step.task_blocklist import TaskBlocklist

Patch = contextlib.AbstractContextManager[Any]
MUTANTS: dict[str, Callable[[], Patch]] = {}


def _mutant(make: Callable[[], Patch]) -> Callable[[], Patch]:
    MUTANTS[make.__name__] = make
    return make


@_mutant
def delete_before_store() -> Patch:
    """A message is deleted as soon as it is received."""
    handle = RolloutBuffer.handle

    async def broken(self: RolloutBuffer, queue: Any, messages: list[Message]) -> None:
        with contextlib.suppress(OSError):
            await queue.delete(messages)
        await handle(self, queue, messages)

    return patch.object(RolloutBuffer, "handle", broken)


@_mutant
def dedupe_by_message_id() -> Patch:
    """Results are deduplicated by message, so a result that is announced twice counts twice."""

    record_result = Ledger.record_result

    def broken(self: Ledger, rollout_id: str, *result: Any, **more: Any) -> ResultStatus:
        self.entries[rollout_id].outcome = None  # as if nothing had arrived
        return record_result(self, rollout_id, *result, **more)

    seen: WeakKeyDictionary[RolloutTask, int] = WeakKeyDictionary()  # how often each result was announced again
    group_result = Group.result

    def result(self: Group, ledger: Ledger) -> GroupResult:
        made = group_result(self, ledger)
        times = {task.rollout_id: 1 + seen.get(task, 0) for task in self.rollouts}
        twice = [rollout for rollout in made.rollouts for _ in range(times[rollout.rollout_id])]
        return replace(made, rollouts=tuple(twice))

    def record_duplicate(self: Step, rollout_id: str) -> None:
        task = self.rollouts.get(rollout_id)
        if task is not None and task.result is not None:
            seen[task] = seen.get(task, 0) + 1

    return _all(
        patch.object(Ledger, "record_result", broken),
        patch.object(Group, "result", result),
        patch.object(Step, "record_duplicate", record_duplicate),
    )


@_mutant
def no_sweep() -> Patch:
    """Results that were not announced are never found."""

    async def forever(*_: Any) -> None:
        await asyncio.Event().wait()

    return _all(
        patch.object(RolloutBuffer, "list_when_idle", forever), patch.object(RolloutBuffer, "fetch_by_key", _answered)
    )


async def _answered(*_: Any) -> bool:
    return True


@_mutant
def listed_only_when_idle() -> Patch:
    """Announcements postpone the listing without a limit."""
    return patch.object(buffer_module, "IDLE_INTERVALS", 10**6)


@_mutant
def results_fetched_concurrently() -> Patch:
    """A listing fetches a result while an announcement's fetch is in flight."""
    return patch.object(KeyLocks, "of", lambda *_: asyncio.Lock())


@_mutant
def unknown_is_absent() -> Patch:
    """A result counts as absent although S3 did not answer."""
    fetch_by_key = RolloutBuffer.fetch_by_key

    async def broken(self: RolloutBuffer, sink: Any, rollout_id: str, attempt: int) -> bool:
        await fetch_by_key(self, sink, rollout_id, attempt)
        return True

    return patch.object(RolloutBuffer, "fetch_by_key", broken)


@_mutant
def defects_escape() -> Patch:
    """An exception about one object ends the receivers or the step."""

    async def broken(what: str, work: Any, failed: Any) -> Any:
        return await work

    return patch.object(buffer_module, "log_defects", broken)


@_mutant
def reward_zero_on_failure() -> Patch:
    """A lost rollout is trained with a reward of 0."""
    result = Group.result

    def broken(self: Group, ledger: Ledger) -> GroupResult:
        made = result(self, ledger)
        lost = [each.rollout_id for each in self.rollouts if each.entry.outcome is Outcome.INFRA_ERROR]
        worthless = [_made_up(step=ledger.step, rollout_id=rollout_id, reward=0.0) for rollout_id in lost]
        return replace(made, rollouts=(*made.rollouts, *worthless))

    return patch.object(Group, "result", broken)


def _made_up(**fields: Any) -> Rollout:
    made: Any = Rollout.model_construct
    return cast(Rollout, made(run_id="simulated", task_id="t", outcome=Outcome.COMPLETED, **fields))


@_mutant
def no_manifest() -> Patch:
    """A restarted trainer finds no manifest."""

    async def nothing(self: ManifestStore, step: int) -> Manifest | None:
        return None

    return patch.object(ManifestStore, "read", nothing)


@_mutant
def manifest_calls_not_retried() -> Patch:
    """Reading or writing a step's manifest is not retried."""

    async def once(self: StepPlan, call: Callable[[], Any]) -> Any:
        return await call()

    return patch.object(StepPlan, "retry", once)


@_mutant
def replacements_not_recorded() -> Patch:
    """A replacement is dispatched before S3 has the manifest that names it."""
    return patch.object(RolloutTask, "run_once_recorded", RolloutTask.run)


@_mutant
def manifest_writes_overtake() -> Patch:
    """Writes of one manifest are neither serialised nor conditional, so the older one may arrive last."""

    async def unordered(self: StepPlan) -> None:
        await self.services.write_manifest(self.manifest)

    async def overtaking(self: ManifestStore, manifest: Manifest) -> None:
        await asyncio.sleep(10 * random())  # noqa: S311  # so that they overtake each other often
        await self.read(manifest.step)  # the write is conditional on the manifest that S3 holds by now
        await write(self, manifest)

    write = ManifestStore.write
    return _all(patch.object(StepPlan, "record", unordered), patch.object(ManifestStore, "write", overtaking))


@_mutant
def active_leases_taken_over() -> Patch:
    """A manager takes over a run although another one renews its lease."""
    return patch.object(LeaseRecord, "manager", lambda *_: None)


@_mutant
def writes_are_unconditional() -> Patch:
    """A manager's writes are unconditional and replace any newer state."""

    async def broken(self: SimStore, key: str, body: bytes, etag: str | None) -> str:
        await self.put(key, body)
        return ""

    return patch.object(SimStore, "put_if_match", broken)


@_mutant
def unconfirmed_leases_start_agents() -> Patch:
    """A manager starts agents although another one may have taken over the run since its last renewal."""

    async def broken(self: RunLease) -> None: ...

    return patch.object(RunLease, "wait_confirmed", broken)


@_mutant
def steps_return_without_a_lease() -> Patch:
    """A step that ends while its manager cannot renew its lease is returned, though another manager has the run."""

    async def broken(self: RunLease) -> None: ...

    return patch.object(RunLease, "try_to_confirm", broken)


@_mutant
def finished_not_reused() -> Patch:
    """A restarted step reuses no finished rollout and runs all of them again."""

    async def nothing(self: RolloutBuffer, sink: Any) -> bool:
        return True

    return patch.object(RolloutBuffer, "sweep", nothing)


@_mutant
def sessions_of_finished_rollouts_left_open() -> Patch:
    """Sessions of earlier starts are closed only for unfinished rollouts."""
    close_earlier = StepSessions.close_earlier
    finished: set[str] = set()  # session ids of finished rollouts
    read_finished = restart_module.read_finished

    async def noted(buffer: RolloutBuffer, sink: Any) -> None:
        await read_finished(buffer, sink)
        finished.clear()
        finished.update(
            sink.session_id(rollout_id, attempt)
            for rollout_id, task in sink.rollouts.items()
            if task.result is not None
            for attempt in range(20)
        )

    async def broken(self: StepSessions, session_ids: Collection[str]) -> None:
        await close_earlier(self, [session_id for session_id in session_ids if session_id not in finished])

    return _all(
        patch.object(restart_module, "read_finished", noted),
        patch.object(StepSessions, "close_earlier", broken),
    )


@_mutant
def session_ids_reused() -> Patch:
    """All attempts of a rollout use one session id."""

    def broken(self: Manifest, rollout_id: str, attempt: int) -> str:
        return f"session-of-{rollout_id}-{self.nonce}"

    return patch.object(Manifest, "session_id", broken)


@_mutant
def failed_attempts_left_open() -> Patch:
    """A session whose invoke got no response counts as never opened."""

    async def broken(
        self: Dispatcher, rollout_id: str, ledger: Ledger, prepare: Callable[[int], Any], close: Any, until: float
    ) -> bool:
        async def forget(session_id: str) -> None:
            ledger.session_closed(session_id)

        return await submit(self, rollout_id, ledger, prepare, forget, until)

    submit = Dispatcher.submit
    return patch.object(Dispatcher, "submit", broken)


@_mutant
def refusals_are_attempts() -> Patch:
    """A throttled invoke counts as a failed attempt."""
    return _all(*(patch.object(kind, "refused", False) for kind in (Throttled, QuotaExceeded)))


@_mutant
def refused_sessions_left_open() -> Patch:
    """A 503 counts as proof that no session was opened."""
    make = RuntimeUnavailable.__init__

    def broken(self: RuntimeUnavailable, message: str, *, refused: bool = False, never_opened: bool = False) -> None:
        make(self, message, never_opened=refused or never_opened)

    return patch.object(RuntimeUnavailable, "__init__", broken)


@_mutant
def stops_abandoned_in_an_outage() -> Patch:
    """A stop is abandoned after eight tries, even within an outage."""
    make = SessionCloser.__init__

    def broken(self: SessionCloser, *args: Any, **more: Any) -> None:
        make(self, *args, **{**more, "retry_s": 0.0})

    return patch.object(SessionCloser, "__init__", broken)


@_mutant
def stops_not_retried() -> Patch:
    """A refused stop is not retried and counts as done."""

    async def broken(self: SessionCloser, session_id: str, ledger: Ledger, call: CallKind = CallKind.STOP) -> bool:
        with contextlib.suppress(Exception):
            await self.stop_once(session_id, ledger, call)
        ledger.session_closed(session_id)
        return True

    return patch.object(SessionCloser, "close", broken)


@_mutant
def results_unchecked() -> Patch:
    """Any object under a rollout's key counts as its result."""
    decode = ResultDecoder.decode

    async def broken(self: ResultDecoder, data: bytes, name: ResultName) -> Rollout:
        try:
            return await decode(self, data, name)
        except ContractError:
            return _made_up(step=name.step, rollout_id=name.rollout_id, reward=1.0, attempt=1, session_id="?")

    return _all(
        patch.object(ResultDecoder, "decode", broken),
        patch.object(fetcher_module, "check_session", lambda *_: None),
    )


@_mutant
def sessions_unchecked() -> Patch:
    """A result counts even if another session wrote it."""
    return patch.object(fetcher_module, "check_session", lambda *_: None)


@_mutant
def forged_failure_markers_end_rollouts() -> Patch:
    """An invalid failure marker ends its rollout, although the result may still arrive."""
    reject = ResultFetcher.reject

    async def broken(self: ResultFetcher, sink: Any, name: ResultName, *more: Any) -> FetchStatus:
        return await reject(self, sink, name._replace(attempt=None), *more)

    return patch.object(ResultFetcher, "reject", broken)


@_mutant
def invalid_results_never_settled() -> Patch:
    """An invalid result is neither rejected nor settled, so each listing fetches it again."""

    async def broken(self: ResultFetcher, *_: Any) -> FetchStatus:
        return FetchStatus.UNKNOWN

    return patch.object(ResultFetcher, "reject", broken)


@_mutant
def late_results_accepted() -> Patch:
    """A rollout that was already settled still counts when its result arrives."""
    is_open = Ledger.is_open

    def broken(self: Ledger, rollout_id: str) -> bool:
        entry = self.entries.get(rollout_id)
        return is_open(self, rollout_id) or (entry is not None and not entry.by_result)

    return patch.object(Ledger, "is_open", broken)


@_mutant
def breaker_never_opens() -> Patch:
    """The run continues after any number of failures for one reason."""
    return patch.object(CircuitBreaker, "evaluate", lambda *_: None)


@_mutant
def stopped_steps_leave_sessions_open() -> Patch:
    """A step that the circuit breaker ends does not close its running sessions."""
    abort = Step.abort

    def broken(self: Step, error: BaseException) -> None:
        for task in self.rollouts.values():
            if task.running is not None:
                task.running.cancel()
        self.ledger.open_sessions.clear()
        abort(self, error)

    return patch.object(Step, "abort", broken)


@_mutant
def stragglers_cut_off_unasked() -> Patch:
    """A straggler is cut off without checking S3 for its result."""

    async def broken(self: AbsenceCheck, rollouts: set[RolloutTask], absent: Callable[[RolloutTask], None]) -> None:
        for rollout in sorted(rollouts, key=lambda each: each.rollout_id):
            absent(rollout)

    return patch.object(AbsenceCheck, "ask", broken)


@_mutant
def stragglers_get_no_time() -> Patch:
    """Once enough rollouts are finished, the others are cut off at once."""
    allowed = StragglerRule.allowed_s

    def broken(self: StragglerRule, took: Sequence[float], still_open: int) -> float | None:
        return None if allowed(self, took, still_open) is None else 0.0

    return patch.object(StragglerRule, "allowed_s", broken)


@_mutant
def full_disk_ends_the_run() -> Patch:
    """A failed write to the run directory ends the receivers."""

    def broken(self: RunArchive, path: Path, data: bytes) -> bool:
        self.write(path, data)
        return True

    return patch.object(RunArchive, "try_to_write", broken)


@_mutant
def blocklist_ignored() -> Patch:
    """Tasks on the blocklist are dispatched again."""
    return patch.object(TaskBlocklist, "block_reason", lambda *_: None)


@_mutant
def lost_journals_pass_for_complete() -> Patch:
    """Agents continue although the journal is lost, and the rest of a trajectory is returned as the whole."""

    def broken(before: Manifest | None, now: Manifest, notes: Any, wall: float) -> Any:
        return resumable_attempts(before and before.model_copy(update={"gateway": now.gateway}), now, notes, wall)

    return _all(
        patch.object(journal, "check_journal", lambda *_: None),
        patch.object(restart_module, "resumable_attempts", broken),
    )


@_mutant
def running_agents_not_adopted() -> Patch:
    """A restarted trainer closes running agents and starts them again."""
    return patch.object(restart_module, "resumable_attempts", lambda *_: {})


@_mutant
def in_flight_log_incomplete() -> Patch:
    """The log of invoked sessions is incomplete, so every session that might be open is stopped."""
    read = InFlightLog.open_sessions

    def broken(self: InFlightLog, step: int, nonce: str) -> OpenSessions:
        return replace(read(self, step, nonce), complete_attempts=frozenset())

    return patch.object(InFlightLog, "open_sessions", broken)


@_mutant
def attempts_logged_after_acceptance() -> Patch:
    """Invokes that are in flight when the trainer is killed are not in the log."""
    return patch.object(InFlightLog, "record_invoked", lambda *_: None)


@_mutant
def sessions_logged_as_stopped_too_early() -> Patch:
    """A session is logged as stopped before its stop is sent."""
    closed = InFlightLog.record_closed

    def broken(self: InFlightLog, step: int, session_id: str) -> None:
        closed(self, step, session_id)
        self.record_stopped(step, session_id)

    return patch.object(InFlightLog, "record_closed", broken)


@_mutant
def adopted_and_dispatched() -> Patch:
    """An adopted rollout is also dispatched again."""
    run = RolloutTask.run

    async def broken(self: RolloutTask) -> None:
        adopted, self.adopted = self.adopted, None
        await run(self)
        if adopted is not None:
            await self.context.sessions.close(adopted.session_id)

    return patch.object(RolloutTask, "run", broken)


@_mutant
def adopted_sessions_left_open() -> Patch:
    """An adopted session is not closed at its end."""
    close = StepSessions.close
    adopt = StepSessions.adopt
    adopted: set[str] = set()

    async def noted(self: StepSessions, session_ids: Collection[str]) -> None:
        adopted.update(session_ids)
        await adopt(self, session_ids)

    async def broken(self: StepSessions, session_id: str) -> None:
        if session_id in adopted:
            self.ledger.session_closed(session_id)
        else:
            await close(self, session_id)

    return _all(patch.object(StepSessions, "adopt", noted), patch.object(StepSessions, "close", broken))


@_mutant
def keys_revoked_with_the_step() -> Patch:
    """An agent that a stop does not reach keeps sampling until its step ends."""

    async def broken(self: StepSessions, session_id: str, call: CallKind = CallKind.STOP) -> None:
        self.services.in_flight.record_closed(self.step, session_id)
        await self.services.closer.close(session_id, self.ledger, call)

    return patch.object(StepSessions, "stop", broken)


@_mutant
def silent_deaths_unnoticed() -> Patch:
    """A container that died silently is awaited until its agent's deadline."""
    return patch.object(Heartbeats, "lost_sessions", set())


@_mutant
def outages_count_as_silence() -> Patch:
    """Silence also counts while no session is heard: a one-minute network outage loses every agent."""
    init = Heartbeats.__init__

    def broken(self: Heartbeats, every_s: float, gateways: int = 1, *, same_machine: bool = False) -> None:
        init(self, every_s, gateways, same_machine=True)

    return patch.object(Heartbeats, "__init__", broken)


@_mutant
def lost_attempts_left_open() -> Patch:
    """The session of an attempt whose container was lost is not stopped."""
    abandon_attempt = RolloutTask.abandon_attempt

    def broken(self: RolloutTask) -> None:
        session_id = self.entry.session_id or ""
        with patch.object(StepSessions, "close_later", lambda *_: None):
            abandon_attempt(self)
        self.context.ledger.session_closed(session_id)

    return patch.object(RolloutTask, "abandon_attempt", broken)


@contextlib.contextmanager
def _all(*patches: Patch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def mutated(name: str) -> Patch:
    """Return a context in which this variant replaces the production code."""
    return MUTANTS[name]()
