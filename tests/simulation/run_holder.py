"""Tracks which manager holds the run, and detects managers that act without holding it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollout_backend.run.lease import LeaseRecord
from tests.simulation.environment import Environment
from tests.simulation.trainer import Trainer

LEASE_S = 60.0
_GRACE_S = 5.0  # an invoke that was sent before the run was taken over may arrive this much later


class RunHolder:
    """The run's holder according to S3. It observes what trainers write and which agents they start."""

    def __init__(self, env: Environment, trainers: Mapping[int, Trainer]) -> None:
        self.id: str | None = None
        self._env = env
        self._trainers = trainers
        self._since = 0.0
        self._lease_written_at = 0.0

    def started(self, by: str, rollout_id: str) -> None:
        """Check that the manager that starts an agent holds the run."""
        if self.id != by and self._env.now() > self._since + _GRACE_S:
            self._env.evidence.fenced_off.append(f"{by} started {rollout_id} while {self.id} held the run")

    def wrote(self, key: str, before: bytes | None, body: bytes) -> None:
        """Check an object that a trainer writes, and read who holds the run."""
        if "/manifests/" in key and before is not None and _fencing_token(before) > _fencing_token(body):
            self._env.evidence.fenced_off.append(
                f"fencing token {_fencing_token(body)} wrote {key} after {_fencing_token(before)}"
            )
        if key.endswith("/lease"):
            now = LeaseRecord.model_validate_json(body)
            if before is not None:
                self._check_taken(LeaseRecord.model_validate_json(before), now)
            self._lease_written_at = self._env.now()
            if now.manager_id != self.id:
                self.id, self._since = now.manager_id, self._env.now()
                self._env.note(f"{self.id} holds the run")

    def _check_taken(self, before: LeaseRecord, now: LeaseRecord) -> None:
        """Check that no manager takes over the run from one that renews its lease."""
        other, taker = before.starting or before.holder, now.starting
        if taker is None or other is None or other.id == taker.id or before.released:
            return
        if self._trainers[other.pid].alive and self._env.now() - self._lease_written_at < LEASE_S:
            self._env.evidence.fenced_off.append(f"{taker.id} took the run from {other.id}, which renewed its lease")


def _fencing_token(body: bytes) -> int:
    """Return the token of a manifest, or of the newest trainer in the run's lineage."""
    fields = json.loads(body)
    return int(fields.get("starts", [fields])[-1]["fencing_token"])
