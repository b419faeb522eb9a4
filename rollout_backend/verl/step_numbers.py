"""Map verl's batches to the backend's step numbers. Pure.

A killed trainer restarts from its checkpoint. The first batch after the restart is sampled with the checkpoint's
weights, exactly as before, so its finished rollouts can be reused. Later batches are sampled with weights that are
trained again, so theirs cannot.

Invariants:

- The number follows from verl's global step and the batch's position in it, so a batch has the same number after a
  restart.
- No two batches of one trainer process have the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from rollout_backend.core.earlier_batches import batch_number


class StepNumbers:
    """Numbers the batches of one trainer process.

    `resumes` says whether the trainer resumes from a checkpoint and may reuse rollouts sampled after it.
    """

    def __init__(self, resumes: bool) -> None:
        self._resumes = resumes
        self._seen: Counter[tuple[int, bool]] = Counter()
        self._first: dict[bool, int] = {}

    def next(self, global_step: int, validate: bool, besides: Container[int] = ()) -> tuple[int, bool]:
        """Return the next batch's number that is not in `besides`, and whether an earlier process sampled it with the
        same weights."""
        while True:
            position = self._seen[global_step, validate]
            self._seen[global_step, validate] += 1
            number = batch_number(global_step, validate, position)
            if number not in besides:
                break
        first = self._first.setdefault(validate, global_step)
        return number, self._resumes and global_step == first
