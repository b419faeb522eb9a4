"""An asynchronous trainer is killed again and again, in virtual time: no rollout is lost, and none runs twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_backend.core.manifest import Manifest, StepRequest
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.step.step import Step
from tests.simulation.async_trainer import AHEAD, AsyncTrainer

KILLS, STEPS, BATCH, SIZE = 50, 100, 2, 4


class Collector:
    """The part of a manager that the trainer calls, over one life of a simulated trainer."""

    def __init__(self, run: Any) -> None:
        self.config = run.config
        self._services = run.services

    async def collect(self, tasks: Iterable[Task], *, step: int, **how: Any) -> StepResult:
        on_group = how.pop("on_group")
        request = StepRequest(step, tuple(tasks), self.config.sampling, **how)
        return await Step(request, self._services, on_group).run()

    async def manifests_from(self, step: int) -> list[Manifest]:
        return await self._services.manifests.read_from(step)


def test_a_trainer_that_is_killed_50_times_loses_no_rollout_and_runs_none_twice(
    make_run, make_config, play, tmp_path: Path
):
    checkpoint, draw = tmp_path / "checkpoint.jsonl", random.Random(1)
    checkpoint.write_text("")

    def task_of(index: int) -> Task:
        return Task(f"t{index}", {"q": f"{index}"})

    async def run_history() -> Any:
        world, lives = None, 0
        while True:
            lives += 1
            run = make_run(make_config(group={"size": SIZE}), world, lives)
            world = run.world
            trainer = AsyncTrainer(Collector(run), checkpoint, BATCH, 2, task_of, lambda rollouts: [])
            training = asyncio.create_task(trainer.train(STEPS))
            await asyncio.wait({training}, timeout=draw.random() * 40 if lives <= KILLS else None)
            if training.done():
                training.result()
                return world, lives
            run.trainer.alive = False
            for dead in (dying := [training, run.receiving, *trainer.collecting]):
                dead.cancel()
            await asyncio.gather(*dying, return_exceptions=True)
            await asyncio.sleep(draw.random() * 20)

    world, lives = play(run_history())
    assert lives == KILLS + 1
    lines = [json.loads(line) for line in checkpoint.read_text().splitlines()]
    outcomes = Counter[str]()
    for line in lines:
        outcomes.update(line["outcomes"])
    prompts = (STEPS + AHEAD) * BATCH
    assert outcomes == {"completed": prompts * SIZE}
    written = world.bucket.written_at.items()
    finished = {key: at for key, at in written if "/steps/" in key and "~" not in key}  # no failure markers
    names = [key.rpartition("/")[2] for key in finished]
    assert sorted(names) == sorted(f"t{index}.{i}" for index in range(prompts) for i in range(SIZE))
    assert not [key for at, key in world.audit.started if at > finished.get(key, at)]
    assert not world.sessions
