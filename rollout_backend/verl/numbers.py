"""Which of the backend's steps a batch of verl's is. Pure.

A trainer that is killed starts again from its checkpoint. The first batch after it is sampled with the checkpoint's
own weights, as it was before, so what was finished then is good; a later one is sampled with weights that were
trained anew. What must always hold: the number follows from verl's global step and the batch's place in it, so that
the same batch has the same number in every life of the trainer, and no two batches of one life have the same.
"""

from __future__ import annotations

from collections import Counter

_PLACES = 500  # batches of one kind in one global step: training refills lost groups, and async trainers take many


class StepNumbers:
    """`resumes`: whether the trainer goes on from a checkpoint if there is one, with what was sampled after it."""

    def __init__(self, resumes: bool) -> None:
        self._resumes = resumes
        self._seen: Counter[tuple[int, bool]] = Counter()
        self._first: dict[bool, int] = {}

    def next(self, global_step: int, validate: bool) -> tuple[int, bool]:
        """The number of the next batch, and whether what an earlier life has sampled for it was sampled with these
        weights."""
        place = self._seen[global_step, validate] % _PLACES
        self._seen[global_step, validate] += 1
        first = self._first.setdefault(validate, global_step)
        return (global_step * 2 + validate) * _PLACES + place, self._resumes and global_step == first
