"""Keep a step's manifest, and write it to S3.

Invariants:

- S3 holds a manifest that names a rollout, and allows an attempt, before that attempt is dispatched;
- if S3 refuses a manifest, only the rollouts that it would record are delayed, at most until the step's deadline;
- one write runs at a time, always of the newest manifest.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TypeVar

from rollout_backend.base.retry import log_retry, retry_until
from rollout_backend.core.lineage import Lineage
from rollout_backend.core.manifest import Manifest, StepRequest
from rollout_backend.errors import CredentialsExpired, StoreError, WriteConflict
from rollout_backend.run.step.services import StepServices

log = logging.getLogger(__name__)

# Limits the write after the step's end, which a restarted trainer can do without.
_LAST_WRITE_S = 60.0

_T = TypeVar("_T")


class StepPlan:
    """The manifest of one step. `write_first` sets `manifest`. `deadline` is the step's, in loop seconds."""

    manifest: Manifest

    def __init__(self, request: StepRequest, services: StepServices) -> None:
        self.deadline = float("inf")
        self.request = request
        self.services = services
        self._recorded: Manifest | None = None
        self._recording = asyncio.Lock()

    async def write_first(self) -> Manifest | None:
        """Write the step's first manifest. Return the previous one in S3."""
        services = self.services
        while True:
            request = self.request
            before = await self.retry(lambda: services.manifests.read(self.request.step))
            lineage = await self.retry(lambda: services.manifests.begin(request.step, request.weights))  # noqa: B023
            if not (
                _can_verify_seals(before, services.sealed_by, request.name)
                and _has_same_weights(before, request, lineage)
            ):
                request = replace(request, same_weights=False)
            now, wall = asyncio.get_running_loop().time(), services.wall()
            self.manifest = Manifest.plan(
                services.config.run_id,
                request,
                services.config.group,
                now=wall,
                deadline=wall + self.deadline - now,
                sealed_by=next(iter(services.sealed_by), ""),
                gateway=services.gateways.identity,
                before=before,
            )
            try:
                await self.retry(self.record)
            # A manager that has lost the run wrote once more. Its rollouts count as well.
            except WriteConflict:
                continue
            if before is not None and not self.manifest.resumed and request is self.request:
                same_weights = request.same_weights and before.weights == request.weights
                log.warning(
                    "step %s was begun with other %s: all of its rollouts run again",
                    request.name,
                    "tasks, sampling or group sizes" if same_weights else f"weights ({before.weights or 'unknown'})",
                )
            return before

    def add_rollout(self, task_id: str) -> str:
        """Plan one more rollout of a task, and return its id. The next `record` writes it to S3."""
        rollout_id = self.manifest.next_rollout(task_id)
        self.manifest = self.manifest.with_rollout(task_id, rollout_id)
        return rollout_id

    async def allow_attempt(self, nth: int) -> None:
        """Record that rollouts may have an nth attempt of this trainer. Raises StoreError at the step's deadline."""
        if nth > self.manifest.attempts:
            self.manifest = self.manifest.model_copy(update={"attempts": nth})
        if self._recorded is None or nth > self._recorded.attempts:
            await self.retry(self.record)

    async def report_log(self) -> None:
        """Record whether the in-flight log lacks sessions. Raises StoreError at the step's deadline."""
        if self.services.in_flight.is_complete(self.manifest.step):
            return
        if self.manifest.is_logged:
            self.manifest = self.manifest.model_copy(update={"is_logged": False})
        if self._recorded is None or self._recorded.is_logged:
            await self.retry(self.record)

    async def record_closed(self, attempts: int) -> bool:
        """Record in S3 that the sessions of the first `attempts` attempts and of replaced steps are closed. Return
        False if S3 does not take the record."""
        self.manifest = self.manifest.model_copy(update={"attempts_closed": attempts, "replaced": ()})
        try:
            async with asyncio.timeout(_LAST_WRITE_S):
                await self.record()
        except (StoreError, WriteConflict, CredentialsExpired, TimeoutError) as error:
            what = str(error) or f"S3 did not take the manifest of step {self.request.name} in time"
            log.warning("%s; if the step is resumed, it stops these sessions again", what)
            return False
        return True

    async def record(self) -> None:
        """Write the current manifest, unless S3 has it already. Raises StoreError."""
        async with self._recording:
            newest = self.manifest
            if self._recorded is not newest:
                await self.services.manifests.write(newest)
                recorded = self._recorded.attempts if self._recorded else 0
                if newest.attempts > recorded:
                    # The log may no longer have the sessions of earlier attempts, if its folder was deleted.
                    first, last = newest.attempts_before + recorded + 1, newest.attempts_before + newest.attempts
                    await self.services.in_flight.record_execution(newest.step, newest.nonce, first, last)
                self._recorded = newest

    async def retry(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Retry a call to S3 with back-off until S3 answers. Raises StoreError at the step's deadline, even if S3
        does not respond."""
        warn = log_retry(log, "step %s waits for S3", self.request.name)
        return await retry_until(self.deadline, call, StoreError, self.services.pauses.store, before_sleep=warn)


def _has_same_weights(before: Manifest | None, request: StepRequest, lineage: Lineage) -> bool:
    """Return whether no trainer in between has trained the weights of an earlier trainer's step again."""
    if before is None or request.weights_are_counted:
        return True
    if lineage.has_same_weights(before.fencing_token, before.step, before.weights):
        return True
    log.warning(
        "step %s was begun by a trainer from whose checkpoint a later one has trained again: all of its rollouts run "
        "again",
        request.name,
    )
    return False


def _can_verify_seals(before: Manifest | None, sealed_by: Collection[str], step: str) -> bool:
    """Return whether the seals of an earlier trainer's results can be verified. If not, none of them can be used."""
    if before is None or not sealed_by or before.sealed_by in sealed_by:
        return True
    log.warning(
        "step %s was begun with another secret, or by another version of this package, so its results cannot be "
        "checked: all of its rollouts run again. To resume a run on another machine, set gateway.secret, or copy "
        "OUTPUT_DIR/.secrets; after a rotation, set gateway.previous_secret",
        step,
    )
    return False
