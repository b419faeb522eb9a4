"""Number a trainer's batches, and find the steps that a restarted asynchronous trainer resumes. Pure.

A number is derived from the trainer's global step, whether the batch validates, and its position among the batches of
this type in the global step. A global step can have hundreds of batches: verl requests one for each poll that finds
lost or filtered groups, and asynchronous trainers take many.

A synchronous trainer repeats its first batch after a restart. An asynchronous one does not: verl puts all unfinished
prompts of its checkpoint into one new batch, whichever batches they came from. It requests the later prompts again
from the dataset, in batches with possibly different boundaries.

Invariants:

- A prompt in the checkpoint is assigned to the step that ran it. The results of that step for other prompts are in
  the checkpoint or already trained.
- Any other prompt is assigned to a step that was requested after the checkpoint and has a group with the same
  content. Each such group is assigned once.
- A step whose rollouts would be too old is not resumed but planned again, which closes its sessions.
- A process begins each step once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent_wrapper.contract import Rollout
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.staleness import AbandonedWeights

_RANGES = ((0, 0, 500), (60_000_000, 500, 2_000), (100_000_000, 0, 1_000_000))
"""The ranges of step numbers: first number, first position, and positions per global step and type of batch."""


def batch_number(global_step: int, validate: bool, position: int) -> int:
    """Return the step number of a batch, from the first range that includes its position."""
    kind = global_step * 2 + validate
    numbers = (first + kind * positions + position - skipped for first, skipped, positions in _RANGES)
    return next(number for number in numbers if order_of(number) == (kind, position))


def order_of(number: int) -> tuple[int, int]:
    """Return the key by which step numbers are sorted: the global step and type of a batch, and its position."""
    first, skipped, positions = max(each for each in _RANGES if each[0] <= number)
    kind, position = divmod(number - first, positions)
    return kind, skipped + position


def global_step_of(number: int) -> int:
    """Return the trainer's global step for the step number of a batch."""
    return order_of(number)[0] // 2


def weights_before(number: int) -> int:
    """Return the version of the weights with which a batch begins: a training step trains the next version, and a
    validation uses that of its own step."""
    return global_step_of(number) - (not validates(number))


def validates(number: int) -> bool:
    """Return whether the batch with this step number is a validation batch."""
    return order_of(number)[0] % 2 == 1


def describe_batch(number: int) -> tuple[str, bool]:
    """Return the name of a batch, and whether it validates, from its step number."""
    position = order_of(number)[1]
    kind = " validation" if validates(number) else ""
    return f"{global_step_of(number)}{kind}{f'.{position}' if position else ''}", validates(number)


@dataclass(frozen=True)
class Origin:
    """The step in which a prompt ran, and its task in that step. Stored in the prompt's tag in TransferQueue."""

    step: int
    task_id: str

    @classmethod
    def read(cls, tag: Mapping[str, object]) -> Origin | None:
        """Return the origin of a prompt with this tag; None if it has none."""
        step, task_id = tag.get("rollout_step"), tag.get("rollout_task")
        return cls(step, task_id) if isinstance(step, int) and isinstance(task_id, str) else None

    def as_tag(self) -> dict[str, object]:
        return {"rollout_step": self.step, "rollout_task": self.task_id}


class EarlierBatches:
    """The steps of killed trainers that this trainer may resume."""

    def __init__(
        self,
        manifests: Iterable[Manifest],
        checkpoint: int,
        max_staleness: int | None,
        restarts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Assign prompts to the steps of these manifests.

        Args:
            manifests: Manifests of the steps that were requested after step `checkpoint`, and of the steps that ran
                the prompts in the checkpoint.
            checkpoint: The step after which this trainer resumes.
            max_staleness: The age limit.
            restarts: The fencing token and the checkpoint of each earlier trainer, in order.
        """
        self._manifests = {each.step: each for each in manifests}
        later = [
            each
            for each in self._manifests.values()
            if not validates(each.step) and global_step_of(each.step) > checkpoint
        ]
        self._digests = {each.step: [task.digest for task in each.tasks] for each in later}
        self._checkpoint = checkpoint
        self._restarts = restarts
        self._max_staleness = max_staleness
        self._begun: set[int] = set()
        self._last = max([checkpoint, *(global_step_of(step) - 1 for step in self._digests)])

    @property
    def steps(self) -> frozenset[int]:
        """The step numbers that no other batch may use."""
        return frozenset(self._digests)

    def requested_in(self, step: int) -> int:
        """Return the global step that requested this step's groups, with abandoned weights counted by their age."""
        began_by = self._trainer_of(step, attempt=1)
        assert began_by is not None
        return self._abandoned_since(began_by).equivalent(global_step_of(step) - 1) + 1

    def relabel(self, step: int, rollout: Rollout) -> Rollout:
        """Return a rollout of an earlier step with the age of abandoned weights in its versions."""
        began_by = self._trainer_of(step, rollout.attempt)
        return rollout if began_by is None else self._abandoned_since(began_by).relabel(rollout)

    def _trainer_of(self, step: int, attempt: int) -> int | None:
        """Return the fencing token of the earlier trainer that made an attempt; None if this trainer made it. Without
        a manifest, return -1, because any earlier trainer may have made it."""
        manifest = self._manifests.get(step)
        return -1 if manifest is None else manifest.token_of(attempt)

    def _abandoned_since(self, fencing_token: int) -> AbandonedWeights:
        """Return the weights that were abandoned since the trainer with this token began."""
        later = (checkpoint for token, checkpoint in self._restarts if token > fencing_token)
        return AbandonedWeights((*later, self._checkpoint), self._last)

    def can_resume(self, step: int, global_step: int) -> bool:
        """Return whether rollouts of this step can be young enough for a batch of `global_step`."""
        return self._max_staleness is None or global_step - self.requested_in(step) <= self._max_staleness

    def assign(self, prompts: Sequence[tuple[str, Origin | None]]) -> list[int | None]:
        """Return the step of each prompt in a batch, given as digest and origin; None for a new prompt."""
        unclaimed = {step: [*digests] for step, digests in sorted(self._digests.items()) if step not in self._begun}
        found: list[int | None] = []
        for digest, origin in prompts:
            if origin is not None:
                found.append(origin.step if origin.step not in self._begun else None)
                continue
            step = next((step for step, digests in unclaimed.items() if digest in digests), None)
            if step is not None:
                unclaimed[step].remove(digest)
            found.append(step)
        self._begun.update(step for step in found if step is not None)
        return found
