"""Variants in which a restarted trainer does not reuse, adopt or close what the previous one left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rollout_backend.base import disk
from rollout_backend.core.manifest import Manifest
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.step import restart as restart_module
from rollout_backend.run.step.in_flight import InFlightLog, OpenSessions
from rollout_backend.run.step.restart import resumable_attempts
from rollout_backend.run.step.rollout_task import RolloutTask
from rollout_backend.run.step.sessions import StepSessions
from tests.simulation.mutants.registry import Patch, all_of, mutant


@mutant
def finished_not_reused() -> Patch:
    """A restarted step reuses no finished rollout and runs all of them again."""

    async def nothing(self: RolloutBuffer, sink: Any) -> bool:
        return True

    return patch.object(RolloutBuffer, "sweep", nothing)


@mutant
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

    return all_of(
        patch.object(restart_module, "read_finished", noted),
        patch.object(StepSessions, "close_earlier", broken),
    )


@mutant
def lost_journals_pass_for_complete() -> Patch:
    """Agents continue although the journal is lost, and the rest of a trajectory is returned as the whole."""

    def broken(before: Manifest | None, now: Manifest, notes: Any, wall: float) -> Any:
        return resumable_attempts(before and before.model_copy(update={"gateway": now.gateway}), now, notes, wall)

    return all_of(
        patch.object(journal_folder, "check_journal", lambda *_: None),
        patch.object(restart_module, "resumable_attempts", broken),
    )


@mutant
def running_agents_not_adopted() -> Patch:
    """A restarted trainer closes running agents and starts them again."""
    return patch.object(restart_module, "resumable_attempts", lambda *_: {})


@mutant
def in_flight_log_incomplete() -> Patch:
    """The log of invoked sessions is incomplete, so every session that might be open is stopped."""
    read = InFlightLog.open_sessions

    async def broken(self: InFlightLog, step: int, nonce: str) -> OpenSessions:
        return replace(await read(self, step, nonce), complete_attempts=frozenset())

    return patch.object(InFlightLog, "open_sessions", broken)


@mutant
def hung_disks_awaited() -> Patch:
    """A step waits for its disk for as long as that does not answer."""
    return patch.object(disk, "DISK_S", 1e9)


@mutant
def unwritten_records_pass_for_complete() -> Patch:
    """The manifest does not say that the log of invoked sessions could not be written."""
    return patch.object(InFlightLog, "is_complete", lambda *_: True)


@mutant
def attempts_logged_after_acceptance() -> Patch:
    """Invokes that are in flight when the trainer is killed are not in the log."""

    async def broken(*_: object) -> None: ...

    return patch.object(InFlightLog, "record_invoked", broken)


@mutant
def sessions_logged_as_stopped_too_early() -> Patch:
    """A session is logged as stopped before its stop is sent."""
    closed = InFlightLog.record_closed

    async def broken(self: InFlightLog, step: int, session_id: str) -> None:
        await closed(self, step, session_id)
        await self.record_stopped(step, session_id)

    return patch.object(InFlightLog, "record_closed", broken)


@mutant
def adopted_and_dispatched() -> Patch:
    """An adopted rollout is also dispatched again."""
    run = RolloutTask.run

    async def broken(self: RolloutTask) -> None:
        adopted = self.entry.session_id
        self.entry.session_id = None
        await run(self)
        if adopted is not None:
            await self.context.sessions.close(adopted)

    return patch.object(RolloutTask, "run", broken)


@mutant
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

    return all_of(patch.object(StepSessions, "adopt", noted), patch.object(StepSessions, "close", broken))
