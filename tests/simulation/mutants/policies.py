"""Variants without a policy of the step: circuit breaker, stragglers, task blocklist."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from rollout_backend.core.policy import Stragglers
from rollout_backend.run.step.absence_check import AbsenceCheck
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.rollout_task import RolloutTask
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from tests.simulation.mutants.registry import Patch, mutant


@mutant
def breaker_never_opens() -> Patch:
    """The run continues after any number of failures for one reason."""
    return patch.object(CircuitBreaker, "evaluate", lambda *_: None)


@mutant
def stragglers_cut_off_unasked() -> Patch:
    """A straggler is cut off without checking S3 for its result."""

    async def broken(
        self: AbsenceCheck, rollouts: dict[RolloutTask, int], absent: Callable[[RolloutTask], None]
    ) -> None:
        for rollout in sorted(rollouts, key=lambda each: each.rollout_id):
            absent(rollout)

    return patch.object(AbsenceCheck, "ask", broken)


@mutant
def stragglers_get_no_time() -> Patch:
    """Once enough rollouts are finished, the others are cut off at once."""
    allowed = Stragglers.allowed_s

    def broken(self: Stragglers, still_open: int) -> float | None:
        return None if allowed(self, still_open) is None else 0.0

    return patch.object(Stragglers, "allowed_s", broken)


@mutant
def blocklist_ignored() -> Patch:
    """Tasks on the blocklist are dispatched again."""
    return patch.object(TaskBlocklist, "block_reason", lambda *_: None)
