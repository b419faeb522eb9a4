"""The record of one planned rollout: how it ended, why, and where to look."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import Ledger, LedgerEntry


class RolloutRecord(BaseModel):
    """How one planned rollout of a step ended. Times in unix seconds by this machine's clock; None: never happened.

    Attempts, sessions and times are those of the manager that wrote the record.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    rollout_id: str
    task_id: str  # names the group as well: the rollouts of one task
    group_usable: bool  # the group policy accepts the rollout's group for training
    is_replacement: bool  # planned for a rollout that the infrastructure lost
    outcome: Outcome | None  # None: the process was interrupted before it settled the rollout
    reason: str  # empty for a completed rollout that is trained
    message: str
    trainable: bool
    attempts: int
    session_ids: tuple[str, ...]  # one per attempt that may have opened one, in order
    log: str | None  # where a person finds the log of the last session
    planned_at: float
    invoked_at: float | None  # the last invoke
    accepted_at: float | None  # the agent of that invoke accepted the rollout
    result_at: float | None  # the result that settled the rollout arrived
    settled_at: float | None

    def is_of(self, rollout: Rollout) -> bool:
        """Return whether this stored result settled the rollout. It may be left of an earlier trainer's attempt."""
        return self.result_at is not None and self.outcome is rollout.outcome


def records_of(ledger: Ledger, log_of: Callable[[LedgerEntry], str]) -> list[RolloutRecord]:
    """Return the records of all planned rollouts, in the order in which they were planned."""
    return [
        RolloutRecord(
            step=ledger.step,
            rollout_id=rollout_id,
            task_id=entry.planned.task_id,
            group_usable=ledger.groups[entry.planned.task_id].usable,
            is_replacement=entry.planned.is_replacement,
            outcome=entry.outcome,
            reason=entry.reason,
            message=entry.message,
            trainable=entry.trainable,
            attempts=entry.attempts,
            session_ids=tuple(entry.session_ids),
            log=(log_of(entry) or None) if entry.session_ids else None,
            planned_at=entry.planned_at,
            invoked_at=entry.invoked_at,
            accepted_at=entry.accepted_at,
            result_at=entry.settled_at if entry.by_result else None,
            settled_at=entry.settled_at,
        )
        for rollout_id, entry in ledger.entries.items()
    ]
