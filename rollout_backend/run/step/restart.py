"""Decide what a restarted trainer can reuse of a step, reuse it, and close all other sessions.

Invariants:

- a running agent is adopted only if the gateway has everything that its session has sampled: it listens at the same
  address, and has the session's journal;
- at most one attempt of a rollout is adopted, and no other is made while that one may publish a result;
- every other session is closed and its key revoked.

`core.manifest.Manifest.plan` decides whether the tasks are those of the interrupted step. The caller decides whether
the weights are the same (for verl, `verl.async_batches`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from rollout_backend.core.ledger import Phase
from rollout_backend.core.manifest import Manifest
from rollout_backend.errors import StoreError
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.fetcher import ResultSink
from rollout_backend.run.step.in_flight import InFlightAttempt
from rollout_backend.run.step.results import StepResults
from rollout_backend.run.step.rollout_task import StepContext

log = logging.getLogger(__name__)


def resumable_attempts(
    before: Manifest | None, now: Manifest, recorded: Iterable[InFlightAttempt], since: float
) -> dict[str, InFlightAttempt]:
    """Return, by rollout, the attempts that an earlier trainer left in flight and whose deadlines are after `since`
    (unix seconds)."""
    if before is None or not now.resumed or not now.gateway or before.gateway != now.gateway:
        return {}
    rollouts = {rollout_id for task in now.tasks for rollout_id in task.rollouts}
    return {
        attempt.rollout_id: attempt
        for attempt in recorded
        if attempt.rollout_id in rollouts
        and attempt.session_id == now.session_id(attempt.rollout_id, attempt.attempt)
        and attempt.deadline > since
    }


async def read_finished(buffer: RolloutBuffer, sink: ResultSink) -> None:
    """Receive every result that is in S3.

    Raises:
        StoreError: a result exists and could not be read; its rollout would run again.
    """
    if not await buffer.sweep(sink):
        raise StoreError("S3 did not give every result of the step")


async def resume(before: Manifest | None, results: StepResults, context: StepContext) -> None:
    """Receive the results of earlier trainers, adopt the attempts in flight, and close every other session that may
    be open: recorded sessions, those of other weights, and those that a trainer on another machine may have invoked.

    Raises:
        StoreError: S3 did not return every result before the step's deadline.
    """
    services, sessions, manifest = context.services, context.sessions, context.plan.manifest
    step, rollouts = context.request.step, results.rollouts
    records = await services.in_flight.running_attempts(step)
    in_flight = (await services.in_flight.open_sessions(step, manifest.nonce)).session_ids
    # An agent of another protocol may have finished in time while no trainer was running to read its result.
    since = services.wall() if services.dispatcher.source is None else -math.inf
    # Read this before the results: another manager may take over in between, and deletes the records at its end.
    left_open: list[str] = []
    for earlier in () if before is None else (before, *before.replaced):
        logged = (await services.in_flight.open_sessions(step, earlier.nonce)).complete_attempts
        # A session stays open after its rollout has finished.
        left_open += earlier.open_sessions(besides=logged if earlier.is_logged else ())
    attempts = resumable_attempts(before, manifest, records, since)
    adopted = [rollouts[rollout_id] for rollout_id in attempts]
    # Adopt first, so that the results of these attempts count.
    for rollout in adopted:
        rollout.adopt(attempts[rollout.rollout_id])
    if manifest.resumed:
        await context.plan.retry(lambda: read_finished(services.buffer, results))
    results.resumed = len(context.ledger.settled) + context.ledger.phases()[Phase.SCORING]
    adopted = [each for each in adopted if each.entry.adopted and each.entry.phase is Phase.RUNNING]
    results.adopted = len(adopted)
    kept = {attempts[each.rollout_id].session_id: None for each in adopted}
    for session_id in kept:
        sessions.watch(session_id)
    unused = [each for each in dict.fromkeys((*in_flight, *left_open)) if each not in kept]
    # With adopted sessions, this is recorded at the end of the step.
    record = not adopted
    sessions.in_background(_close_unused(unused, record, context))
    sessions.earlier_known = True
    # Adopted rollouts already have sessions, so they get the first slots.
    for rollout in adopted:
        rollout.start_adopted()
    await sessions.adopt(kept.keys())
    if manifest.resumed:
        log.info(
            "step %s is resumed: of %d rollouts %d are finished and %d still run; the sessions of the others are "
            "closed",
            context.request.name,
            len(rollouts),
            results.resumed,
            results.adopted,
        )


async def _close_unused(session_ids: list[str], record: bool, context: StepContext) -> None:
    if session_ids:
        await context.sessions.close_earlier(session_ids)
        if record:
            await context.plan.record_closed(context.plan.manifest.attempts_before)
