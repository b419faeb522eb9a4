"""Record each trainer of a run and its first step, because a restart reuses only results of its own lineage. Pure.

A trainer that resumes from a checkpoint trains later steps again, and gives their weights the same names as its
predecessor. The predecessor's results of these steps were sampled from weights that no longer exist.

Invariants:

- a trainer is recorded before its first manifest is written;
- trainers are ordered by their fencing tokens, never by a clock.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from agent_wrapper.contract import MAX_STEP, ContractObject, Identifier
from rollout_backend.core.earlier_batches import order_of, weights_before


class TrainerStart(ContractObject):
    """The first step that a trainer planned, and the weights with which it began."""

    fencing_token: int = Field(ge=0)
    step: int = Field(ge=0, le=MAX_STEP)
    weights: str = ""

    @property
    def checkpoint(self) -> int:
        """Return the version of the trainer's checkpoint, if its steps are numbered by `batch_number`."""
        return weights_before(self.step)


class Lineage(ContractObject):
    """The trainers of a run that have planned a step, in the order of their fencing tokens."""

    schema_version: Literal[1] = 1
    run_id: Identifier
    starts: tuple[TrainerStart, ...] = ()

    @property
    def newest(self) -> int:
        """The largest fencing token; -1 if there is no trainer."""
        return self.starts[-1].fencing_token if self.starts else -1

    def with_start(self, start: TrainerStart) -> Self:
        """Return the lineage with a trainer that is newer than all others."""
        assert start.fencing_token > self.newest
        return self.model_copy(update={"starts": (*self.starts, start)})

    def after(self, fencing_token: int) -> list[TrainerStart]:
        """Return the trainers that began after the one with this token."""
        return [each for each in self.starts if each.fencing_token > fencing_token]

    def has_same_weights(self, fencing_token: int, step: int, weights: str) -> bool:
        """Return whether the newest trainer still has the weights from which this trainer sampled a step.

        They were trained again if a trainer in between began with other weights at or before the step. The newest
        trainer itself does not count: it names weights that it has trained.
        """
        if all(each.fencing_token != fencing_token for each in self.starts):
            return False
        return all(
            each.weights == weights or order_of(each.step) > order_of(step)
            for each in self.after(fencing_token)
            if each.fencing_token < self.newest
        )
