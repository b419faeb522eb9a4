"""Variants in which the manifest or the lease in S3 does not protect a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import random
from typing import Any
from unittest.mock import patch

from rollout_backend.base.retry import at, retry
from rollout_backend.core.lineage import Lineage, TrainerStart
from rollout_backend.core.manifest import Manifest
from rollout_backend.errors import StoreError, WriteConflict
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.lease import LeaseRecord, RunLease
from rollout_backend.run.step.plan import StepPlan
from rollout_backend.run.step.rollout_task import RolloutTask
from tests.simulation import s3
from tests.simulation.mutants.registry import Patch, all_of, mutant
from tests.simulation.s3 import SimStore


@mutant
def no_manifest() -> Patch:
    """A restarted trainer finds no manifest."""

    async def nothing(self: ManifestStore, step: int) -> Manifest | None:
        return None

    return patch.object(ManifestStore, "read", nothing)


@mutant
def manifest_calls_not_retried() -> Patch:
    """Reading or writing a step's manifest is not retried."""

    async def once(self: StepPlan, call: Callable[[], Any]) -> Any:
        return await call()

    return patch.object(StepPlan, "retry", once)


@mutant
def silent_calls_outlast_a_step() -> Patch:
    """A call of S3 without an answer is not interrupted at the step's deadline, nor soon by the client."""

    async def uninterrupted(self: StepPlan, call: Callable[[], Any]) -> Any:
        return await retry(call, StoreError, self.services.pauses.store, stop=at(self.deadline))

    return all_of(patch.object(StepPlan, "retry", uninterrupted), _patient_client())


@mutant
def last_writes_without_a_limit() -> Patch:
    """The last write of a step's manifest may take as long as S3 is silent, which the client does not end."""

    async def broken(self: StepPlan, attempts: int) -> bool:
        self.manifest = self.manifest.model_copy(update={"attempts_closed": attempts, "replaced": ()})
        with contextlib.suppress(StoreError, WriteConflict):
            await self.record()
        return True

    return all_of(patch.object(StepPlan, "record_closed", broken), _patient_client())


def _patient_client() -> Patch:
    # The client's own limit would hide that an owner sets none.
    return patch.object(s3, "SILENT_S", 3600.0)


@mutant
def replacements_not_recorded() -> Patch:
    """A replacement is dispatched before S3 has the manifest that names it."""
    return patch.object(RolloutTask, "run_once_recorded", RolloutTask.run)


@mutant
def manifest_writes_overtake() -> Patch:
    """Writes of one manifest are neither serialised nor conditional, so the older one may arrive last."""

    async def unordered(self: StepPlan) -> None:
        await self.services.manifests.write(self.manifest)

    async def overtaking(self: ManifestStore, manifest: Manifest) -> None:
        await asyncio.sleep(10 * random())  # so that they overtake each other often
        await self.read(manifest.step)  # the write is conditional on the manifest that S3 holds by now
        await write(self, manifest)

    write = ManifestStore.write
    return all_of(patch.object(StepPlan, "record", unordered), patch.object(ManifestStore, "write", overtaking))


@mutant
def retrained_weights_pass_for_the_same() -> Patch:
    """Results count although a trainer in between has trained the weights of their step again."""
    return patch.object(Lineage, "has_same_weights", lambda *_: True)


@mutant
def lineage_in_the_order_of_steps() -> Patch:
    """A trainer counts as older than another one if it began at an earlier step."""

    def broken(self: Lineage, fencing_token: int) -> list[TrainerStart]:
        own = max((each.step for each in self.starts if each.fencing_token == fencing_token), default=-1)
        return [each for each in self.starts if each.step > own]

    return patch.object(Lineage, "after", broken)


@mutant
def active_leases_taken_over() -> Patch:
    """A manager takes over a run although another one renews its lease."""
    return patch.object(LeaseRecord, "manager", lambda *_: None)


@mutant
def writes_are_unconditional() -> Patch:
    """A manager's writes are unconditional and replace any newer state."""

    async def broken(self: SimStore, key: str, body: bytes, etag: str | None) -> str:
        await self.put(key, body)
        return ""

    return patch.object(SimStore, "put_if_match", broken)


@mutant
def unconfirmed_leases_start_agents() -> Patch:
    """A manager starts agents although another one may have taken over the run since its last renewal."""

    return patch.object(RunLease, "is_confirmed", True)


@mutant
def steps_return_without_a_lease() -> Patch:
    """A step that ends while its manager cannot renew its lease is returned, though another manager has the run."""

    async def broken(self: RunLease) -> None: ...

    return patch.object(RunLease, "try_to_confirm", broken)
