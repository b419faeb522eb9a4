"""Number verl's batches as steps, divide those of its asynchronous trainers, and resume a killed trainer's steps.

A killed trainer restarts from its checkpoint. The first batch after the restart is sampled with the checkpoint's
weights, exactly as before, so its finished rollouts can be reused. Later batches are sampled with weights that are
trained again, so theirs cannot.

Invariants:

- The number follows from verl's global step and the batch's position in it, so a batch has the same number after a
  restart.
- No two batches of one trainer process have the same number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

from rollout_backend.config import RolloutConfig
from rollout_backend.core.earlier_batches import EarlierBatches, Origin, batch_number, order_of, weights_before
from rollout_backend.core.manifest import digest_of
from rollout_backend.core.tasks import Task
from rollout_backend.manager import BlockingRolloutManager
from rollout_backend.run.step.results import Group
from rollout_backend.verl.v1_batch import Request, V1Batch, read_origins
from rollout_backend.verl.verl_settings import max_staleness_of, resumes_steps


class StepNumbers:
    """Numbers the batches of one trainer process.

    `resumes` says whether the trainer resumes from a checkpoint and may reuse rollouts sampled after it.
    """

    def __init__(self, resumes: bool) -> None:
        self._resumes = resumes
        self._seen: Counter[tuple[int, bool]] = Counter()
        # The version of the weights with which this process began.
        self._checkpoint: int | None = None

    def next(self, global_step: int, validate: bool, besides: Container[int] = ()) -> tuple[int, bool]:
        """Return the next batch's number that is not in `besides`, and whether an earlier process sampled it with the
        same weights."""
        while True:
            position = self._seen[global_step, validate]
            self._seen[global_step, validate] += 1
            number = batch_number(global_step, validate, position)
            if number not in besides:
                break
        if self._checkpoint is None:
            self._checkpoint = weights_before(number)
        return number, self._resumes and weights_before(number) == self._checkpoint


class AsyncBatches:
    """The batches of one process. `trainer` is verl's section of settings."""

    def __init__(self, manager: BlockingRolloutManager, settings: RolloutConfig, trainer: Any) -> None:
        self._manager = manager
        self._settings = settings
        self._resumes = resumes_steps(trainer)
        self._max_staleness = max_staleness_of(trainer)
        self._earlier: EarlierBatches | None = None
        self._origins: dict[str, Origin] = {}
        self._numbers = StepNumbers(resumes=False)

    def divide(self, requests: Sequence[Request], step: int, validate: bool) -> list[tuple[V1Batch, bool]]:
        """Return the parts of verl's batch of a global step, each with whether it resumes an earlier step.

        Raises:
            ManifestError, StoreError: the steps of an earlier process could not be read.
        """
        if validate:
            own, _ = self._numbers.next(step, validate)
            return [(V1Batch(own, requests, validates=True), False)]
        if self._earlier is None:
            self._earlier = self._read_earlier(checkpoint=step - 1)
        earlier = self._earlier
        origins = [self._origins.get(str(row["uid"])) for row, _ in requests]
        digests = [self._digest(task) for _, task in requests]
        parts: dict[int | None, list[Request]] = {}
        numbers = earlier.assign([*zip(digests, origins, strict=True)])
        for (row, task), origin, number in zip(requests, origins, numbers, strict=True):
            if origin is not None:
                task = dataclasses.replace(task, task_id=origin.task_id)
            parts.setdefault(number, []).append((row, task))
        divided = []
        for found, part in parts.items():
            if found is None:
                new, _ = self._numbers.next(step, validate, besides=earlier.steps)
                divided.append((V1Batch(new, part), False))
            elif earlier.can_resume(found, step):
                requested = {"global_steps": earlier.requested_in(found)}
                aged = [({**row, **requested}, task) for row, task in part]
                relabel = functools.partial(earlier.relabel, found)
                divided.append((V1Batch(found, aged, relabel=relabel), True))
            else:
                divided.append((V1Batch(found, part), False))
        return divided

    def _read_earlier(self, checkpoint: int) -> EarlierBatches:
        """Return the steps that an earlier process began after verl's checkpoint."""
        if not self._resumes:
            return EarlierBatches((), checkpoint, self._max_staleness)
        self._origins = read_origins()
        manager, first = self._manager.manager, batch_number(checkpoint + 1, validate=False, position=0)
        lineage = self._manager.wait_for(manager.begin_at(first))
        oldest = min((first, *(origin.step for origin in self._origins.values())), key=order_of)
        manifests = self._manager.wait_for(manager.manifests_from(oldest))
        restarts = [(each.fencing_token, each.checkpoint) for each in lineage.starts[:-1]]
        return EarlierBatches(manifests, checkpoint, self._max_staleness, restarts)

    def _digest(self, task: Task) -> str:
        assert task.sampling is not None
        return digest_of(task, Group(task, self._settings.group).planned, task.sampling)
