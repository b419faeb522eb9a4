"""What an earlier take of a step has left, and what of it a trainer that is started again may go on with.

What must always hold:

- an agent is gone on with only if its session is whole here: the gateway listens where it did, and has its journal;
- of a rollout one attempt is gone on with, and no other is made while it may come to something;
- of everything else the session is closed and the key revoked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from rollout_backend.collect.buffer import ResultSink, RolloutBuffer
from rollout_backend.dispatched import Note
from rollout_backend.errors import StoreError
from rollout_backend.manifest import Manifest

log = logging.getLogger(__name__)

_READS = 8  # attempts to read what an earlier take has finished: some two minutes


def can_check(before: Manifest | None, sealed_by: str) -> bool:
    """Whether the seals of an earlier take can be told from forgeries; if not, nothing of it can be used."""
    if before is None or not sealed_by or before.sealed_by == sealed_by:
        return True
    log.warning(
        "step %d was begun before with another secret, so its results cannot be checked: all of it is run anew. "
        "To go on with a run on another machine, set gateway.secret, or take the run's folder along",
        before.step,
    )
    return False


def adoptable(before: Manifest | None, now: Manifest, notes: Iterable[Note], wall: float) -> dict[str, Note]:
    """By rollout: the attempt of an earlier take that may still come to something. `wall` in unix seconds."""
    if before is None or not now.resumed or not now.gateway or before.gateway != now.gateway:
        return {}
    rollouts = {rollout_id for task in now.tasks for rollout_id in task.rollouts}
    return {
        note.rollout_id: note
        for note in notes
        if note.rollout_id in rollouts
        and note.session_id == now.session_id(note.rollout_id, note.attempt)
        and note.deadline > wall
    }


async def read_finished(buffer: RolloutBuffer, sink: ResultSink) -> None:
    """Takes every result that stands in S3.

    Raises:
        StoreError: one is there and was not read; it would be run again.
    """
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StoreError),
        stop=stop_after_attempt(_READS),
        wait=wait_exponential_jitter(multiplier=0.5, max=20),
        reraise=True,
    ):
        with attempt:
            if not await buffer.sweep(sink):
                raise StoreError(f"S3 did not give every result that step {sink.step} has; run it again")
