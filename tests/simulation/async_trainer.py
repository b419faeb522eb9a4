"""An asynchronous trainer without a model. It may be killed at any time.

It requests, samples, saves and restores as verl's `separate_async` does: a checkpoint holds the finished groups and
the prompts of the unfinished ones. After a restart it requests these in one batch, and later ones again from the
dataset.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout_backend.config import RolloutConfig
from rollout_backend.core.adapter import number_of
from rollout_backend.core.earlier_batches import EarlierBatches, Origin, batch_number
from rollout_backend.core.manifest import Manifest, digest_of
from rollout_backend.core.staleness import groups_to_await
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import GroupResult, StepResult

AHEAD = 2  # batches, and the age limit
TRAINING_S = 0.3


@dataclass
class Prompt:
    """A prompt that was requested and is not trained yet."""

    index: int  # in the dataset
    requested_in: int
    origin: Origin | None = None
    result: dict[str, Any] | None = None  # of its group, once that is finished


class Collector(Protocol):
    """What the trainer needs of a `RolloutManager`."""

    config: RolloutConfig

    async def collect(
        self,
        tasks: Iterable[Task],
        *,
        step: int,
        on_group: Callable[[GroupResult], None],
        same_weights: bool,
        allow_subset: bool,
    ) -> StepResult: ...

    async def manifests_from(self, step: int) -> list[Manifest]: ...


class AsyncTrainer:
    """Trains until `steps` are done. `task_of` makes a task from its index, `rows_of` rows from rollouts."""

    def __init__(
        self,
        manager: Collector,
        checkpoint: Path,
        batch_size: int,
        save_every: int,
        task_of: Callable[[int], Task],
        rows_of: Callable[[Any], list[str]],
    ) -> None:
        self._manager = manager
        self._lines = checkpoint
        self._state = checkpoint.with_suffix(".state")
        self._version = checkpoint.with_suffix(".version")
        self._batch_size = batch_size
        self._save_every = save_every
        self._task_of = task_of
        self._rows_of = rows_of
        self._step, self._next, self._prompts = self._load()
        self._earlier = EarlierBatches((), 0, None)
        self._positions: Counter[int] = Counter()
        self.collecting: list[asyncio.Task[None]] = []  # the steps in flight
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()

    async def train(self, steps: int) -> None:
        """Train from the checkpoint."""
        saved = self._step
        self._write(self._lines, "".join(self._lines.read_text().splitlines(keepends=True)[:saved]))
        self._write(self._version, str(saved))
        manifests = await self._manager.manifests_from(batch_number(saved + 1, validate=False, position=0))
        self._earlier = EarlierBatches(manifests, saved, AHEAD)
        self._request([prompt for prompt in self._prompts if prompt.result is None], saved + 1)
        self._request_new(AHEAD * self._batch_size - len(self._prompts), saved + 1)
        for step in range(saved + 1, steps + 1):
            self._request_new(self._batch_size, step)
            batch = await self._sample(step)
            await asyncio.sleep(TRAINING_S)
            self._prompts = [prompt for prompt in self._prompts if prompt not in batch]
            self._step = step
            self._report([prompt.result for prompt in batch], step)
            if step % self._save_every == 0 or step == steps:
                self._save()
            self._write(self._version, str(step))
        await asyncio.gather(*self.collecting)
        self._report([prompt.result for prompt in self._prompts], steps)

    async def _sample(self, step: int) -> list[Prompt]:
        """Wait for the oldest finished groups."""
        while True:
            self._changed.clear()
            finished = [prompt for prompt in self._prompts if prompt.result is not None]
            unfinished = [prompt.requested_in for prompt in self._prompts if prompt.result is None]
            if len(finished) >= self._batch_size and not groups_to_await(unfinished, step, AHEAD, self._batch_size):
                return sorted(finished, key=lambda prompt: prompt.requested_in)[: self._batch_size]
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, *self.collecting}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            for done in (task for task in self.collecting if task.done()):
                done.result()
            self.collecting = [task for task in self.collecting if not task.done()]

    def _request_new(self, count: int, step: int) -> None:
        prompts = [Prompt(self._next + i, step) for i in range(max(0, count))]
        self._next += len(prompts)
        self._prompts += prompts
        self._request(prompts, step)

    def _request(self, prompts: Sequence[Prompt], step: int) -> None:
        """Collect the prompts in the steps that they resume, or in a new one."""
        tasks = [self._task_of(prompt.index) for prompt in prompts]
        config = self._manager.config
        digests = [digest_of(task, config.group.size, config.sampling) for task in tasks]
        numbers = self._earlier.assign([*zip(digests, (prompt.origin for prompt in prompts), strict=True)])
        parts: dict[int | None, dict[str, Prompt]] = {}
        for prompt, number in zip(prompts, numbers, strict=True):
            task_id = self._task_of(prompt.index).task_id if prompt.origin is None else prompt.origin.task_id
            parts.setdefault(number, {})[task_id] = prompt
        for found, part in parts.items():
            number = self._new_number(step) if found is None else found
            resumes = found is not None and self._earlier.can_resume(found, step)
            for task_id, prompt in part.items():
                prompt.origin = Origin(number, task_id)
                prompt.requested_in = self._earlier.requested_in(number) if resumes else step
            self.collecting.append(asyncio.create_task(self._collect(number, part, resumes)))

    def _new_number(self, step: int) -> int:
        while True:
            number = batch_number(step, validate=False, position=self._positions[step])
            self._positions[step] += 1
            if number not in self._earlier.steps:
                return number

    async def _collect(self, number: int, prompts: dict[str, Prompt], resumes: bool) -> None:
        def on_group(group: GroupResult) -> None:
            relabel = functools.partial(self._earlier.relabel, number)
            rollouts = [*map(relabel, group.rollouts)] if resumes else group.rollouts
            turns = [turn for each in rollouts for segment in each.segments for turn in segment.turns]
            versions = [number_of(span.version) for turn in turns for span in turn.weight_versions]
            outcomes = Counter({"completed": len(rollouts)})
            outcomes.update(str(failure.outcome) for failure in group.failures)
            prompts[group.task.task_id].result = {
                "planned": group.planned,
                "outcomes": dict(outcomes),
                "rows": self._rows_of(group.rollouts),
                "oldest": min((version for version in versions if version is not None), default=0),
            }
            self._changed.set()

        tasks = [dataclasses.replace(self._task_of(each.index), task_id=name) for name, each in prompts.items()]
        result = await self._manager.collect(
            tasks, step=number, same_weights=resumes, allow_subset=True, on_group=on_group
        )
        report = result.report
        self._counts.update(
            resumed=report.resumed, reattached=report.reattached, unclosed=len(report.unclosed_sessions)
        )

    def _report(self, groups: Sequence[dict[str, Any] | None], step: int) -> None:
        """Append a line for a step, or for the groups that are left at the end."""
        trained = [group for group in groups if group is not None]
        outcomes: Counter[str] = Counter()
        for group in trained:
            outcomes.update(group["outcomes"])
        line = {
            "step": step,
            "planned": sum(group["planned"] for group in trained),
            "outcomes": dict(outcomes),
            "rows": [row for group in trained for row in group["rows"]],
            "age": max(step - 1 - group["oldest"] for group in trained),
            **{name: self._counts[name] for name in ("resumed", "reattached", "unclosed")},
        }
        self._counts.clear()
        with self._lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _load(self) -> tuple[int, int, list[Prompt]]:
        if not self._state.exists():
            return 0, 0, []
        state = json.loads(self._state.read_text())
        prompts = [Prompt(**{**each, "origin": Origin(**each["origin"])}) for each in state["prompts"]]
        return state["step"], state["next"], prompts

    def _save(self) -> None:
        state = {"step": self._step, "next": self._next, "prompts": [*map(dataclasses.asdict, self._prompts)]}
        self._write(self._state, json.dumps(state))

    @staticmethod
    def _write(path: Path, text: str) -> None:
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)
