"""A training with the loop, whose process can be killed, on an emulated service of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent_wrapper.contract import Outcome, Segment
from agent_wrapper.contract.keys import training_key
from memory_store import MemoryStore
from rollout_backend.core.earlier_batches import describe_batch
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import GroupResult, StepResult
from rollout_backend.training.loop import TrainingRecord
from rollouts import make_rollout, make_turn
from tests.emulators.tiny_learner import TabularPolicy

PROMPT, LENGTH, GROUP = [100, 101], 3, 8
TASKS = [Task(task_id=f"task-{number}", payload={}) for number in range(4)]


class Killed(BaseException):
    """The process ends here."""


class World:
    """What outlives a process: the bucket, the results in it, and the service. `left` calls with an effect are made
    before the process is killed."""

    def __init__(self, saved: Mapping[str, tuple[str, TabularPolicy]], left: float = float("inf")) -> None:
        self.saved = saved
        self.store = MemoryStore("")
        self.results: dict[tuple[int, str, str], Any] = {}
        self.sampled = 0
        self.left = left

    def effect(self) -> None:
        if self.left <= 0:
            raise Killed
        self.left -= 1

    def record(self) -> TrainingRecord:
        return TrainingRecord.model_validate_json(self.store.objects[training_key("", "run")])


class Store(MemoryStore):
    """A process's client of the bucket."""

    def __init__(self, world: World) -> None:
        self.config, self.objects, self.failures, self._world = world.store.config, world.store.objects, 0, world

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str:
        self._world.effect()
        found = await super().put_if_match(key, body, etag)
        self._world.effect()
        return found


class Sampled:
    """Rollouts that the emulator's weights sample: each is rewarded for the tokens 1 among its three."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._served, self._version = "", -1
        self.collected: list[tuple[str, tuple[str, ...], str]] = []

    async def serve(self, path: str, version: int) -> None:
        assert path in self._world.saved
        self._served, self._version = path, version

    async def collect(self, tasks: Sequence[Task], *, step: int, weights: str) -> StepResult:
        assert weights == self._served
        name = describe_batch(step)[0]
        self.collected.append((name, tuple(task.task_id for task in tasks), weights))
        groups = [
            GroupResult(
                task=task,
                rollouts=tuple(self._rollout(step, task, i) for i in range(GROUP)),
                usable=True,
                planned=GROUP,
            )
            for task in tasks
        ]
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        return StepResult(step, rollouts, tuple(groups), (), SimpleNamespace())  # type: ignore[arg-type]

    def _rollout(self, step: int, task: Task, index: int) -> Any:
        """Return a rollout, from S3 if these weights have sampled it."""
        key = (step, f"{task.task_id}.{index}", self._served)
        if key not in self._world.results:
            self._world.effect()
            self._world.sampled += 1
            policy = self._world.saved[self._served][1]
            rng = np.random.default_rng([step, *map(ord, key[1])])
            tokens, logprobs, _ = policy.sample(PROMPT, {"max_tokens": LENGTH}, rng)
            turn = make_turn(2, 2 + LENGTH, str(self._version))
            segment = Segment(
                token_ids=PROMPT + tokens,
                response_mask=[0, 0] + [1] * LENGTH,
                logprobs=[None, None, *logprobs],
                turns=[turn],
            )
            reward = tokens.count(1) / LENGTH
            self._world.results[key] = make_rollout(key[1], Outcome.COMPLETED, reward=reward, segments=[segment])
        return self._world.results[key]
