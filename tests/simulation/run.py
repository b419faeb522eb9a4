"""One history: a run whose trainer is killed and restarted until all steps are done, in the world of a seed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

from agent_wrapper.contract import Announcement
from rollout_backend.agents.protocols import translator
from tests.simulation.checks import Checks, Violation
from tests.simulation.clock import Deadlock, VirtualLoop
from tests.simulation.faults import Faults
from tests.simulation.s3 import BUCKET
from tests.simulation.scenario import Scenario, planned_rollouts
from tests.simulation.trainer import Killed, Trainer
from tests.simulation.trainer_process import MOST_KILLS, Progress, TrainerProcess
from tests.simulation.world import World

_WAIT_S = 600.0  # limit of the waits for S3 while a lease begins or is confirmed
_MOST_STARTS = 60


@dataclass(frozen=True)
class Verdict:
    """The result of a seed. `violation` is the first one; None if there was none."""

    seed: int
    violation: str | None
    history: tuple[str, ...]
    trainers: int
    outcomes: dict[str, int]
    reattached: int


def simulate(seed: int, faults: Faults | None = None, planned: int | None = None) -> Verdict:
    """Play the history of a seed. It is deterministic. `planned` replaces the number of rollouts of a step."""
    random.seed(seed)  # tenacity's jitter
    draw = random.Random(seed)
    logger = logging.getLogger("rollout_backend")  # hundreds of planned faults would be logged
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _, context: None)  # tasks of killed trainers fail
    run = SimulatedRun(seed, faults, planned or planned_rollouts(seed))
    try:
        # Session ids follow from a manifest's nonce, and the iteration order of sets follows from session ids.
        nonces = patch.object(secrets, "token_hex", lambda nbytes: draw.randbytes(nbytes).hex())
        clock = patch.object(translator, "time", SimpleNamespace(time=run.world.wall))
        with nonces, clock, asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run.play())
        violation = None
    except Violation as error:
        violation = str(error)
    except (Exception, Deadlock) as error:
        violation = f"{type(error).__name__}: {error}"
    finally:
        logger.setLevel(level)
    world, done = run.world, run.progress
    return Verdict(
        seed, violation, tuple(world.history), len(world.trainers), dict(done.outcomes), reattached=done.reattached
    )


class SimulatedRun:
    """The run of one seed, and the supervisor that restarts its trainer."""

    def __init__(self, seed: int, faults: Faults | None, planned: int | None) -> None:
        self.world = World(seed, faults, planned)
        self.progress = Progress()
        self._scenario = Scenario.draw(self.world, planned, scored=seed % 2 == 1)
        self.world.agents.publish_artifacts = self._scenario.scored
        self._checks = Checks(self.world, self._scenario.config, scored=self._scenario.scored)

    @property
    def _longest_life_s(self) -> float:
        """Return how long a trainer may take, with the time in which it waits for S3 at its start and its end."""
        return len(self._scenario.steps) * (self._checks.longest_step_s + _WAIT_S) + 2 * _WAIT_S

    async def play(self) -> None:
        """Play the history. Raises Violation."""
        world = self.world
        if world.faults.queue_gone:
            asyncio.get_running_loop().call_later(world.random.random() * 60, world.queue.lose)
        chattering = asyncio.create_task(self._chatter()) if world.faults.chatter else None
        while self.progress.steps < len(self._scenario.steps):
            if world.trainers:
                await world.passes(world.random.choice([0, 5, 40]))  # until the supervisor restarts it
            await self._run_trainer()
            if len(world.trainers) > _MOST_STARTS:
                raise Violation(f"the run does not end after {len(world.trainers)} starts")
        if chattering is not None:
            chattering.cancel()
        await asyncio.sleep(60)
        self._checks.run_ended()

    async def _run_trainer(self) -> None:
        """Run a trainer until it ends or is killed, sometimes with a rival."""
        world = self.world
        trainer = self._make_trainer("here")
        running = asyncio.create_task(self._run(trainer))
        rival = asyncio.create_task(self._run_rival(trainer)) if world.chance("rival") else None
        if len(world.trainers) < MOST_KILLS and world.chance("kill"):
            await asyncio.wait({running}, timeout=world.random.random() * world.random.choice([2, 15, 60]))
        else:
            await asyncio.wait({running}, timeout=self._longest_life_s)
            if not running.done():
                raise Violation(f"trainer {trainer.number} waits without an end")
        trainer.alive, trainer.ended_at = False, world.now()
        if not running.done():
            world.note(f"trainer {trainer.number} is killed")
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        if rival is not None:
            await rival

    async def _run_rival(self, first: Trainer) -> None:
        """Start the run on another machine, too."""
        world = self.world
        await world.passes(30)
        if world.chance("s3_cut_off"):
            first.cut_off_until = world.now() + 60 + world.random.random() * 180
            world.note(f"trainer {first.number} cannot reach S3 until {first.cut_off_until:.0f}")
        second = self._make_trainer("elsewhere")
        await self._run(second)
        second.alive, second.ended_at = False, world.now()

    def _make_trainer(self, machine: str) -> Trainer:
        trainer = Trainer(len(self.world.trainers) + 1, machine)
        self.world.trainers[trainer.number] = trainer
        self.world.note(f"trainer {trainer.number} starts {machine} at step {self.progress.steps}")
        return trainer

    async def _run(self, trainer: Trainer) -> None:
        with contextlib.suppress(Killed):
            await TrainerProcess(self.world, self._scenario, self._checks, self.progress, trainer).run()

    async def _chatter(self) -> None:
        """Send announcements of a step that is not collected, so that the queue is never idle."""
        while True:
            await self.world.passes(8)
            self.world.queue.send(Announcement(bucket=BUCKET, key=self._checks.key(99, "another.0")).encode())
