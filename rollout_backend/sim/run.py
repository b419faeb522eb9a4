"""One history: a trainer that collects its steps, is killed, and starts again, in the world of a seed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agent_wrapper.contract import ModelEndpoint, Outcome
from rollout_backend.breaker import Breaker
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.manifests import ManifestStore
from rollout_backend.collect.set_aside import SetAside
from rollout_backend.config import RolloutConfig
from rollout_backend.dispatch.closer import SessionCloser
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.errors import CircuitOpen, StoreError
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.ledger import PlannedRollout
from rollout_backend.sim.checks import Checks, Violation
from rollout_backend.sim.clock import Deadlock, VirtualLoop
from rollout_backend.sim.faults import Faults
from rollout_backend.sim.world import BUCKET, Killed, SimDispatched, SimQueue, SimRuntime, SimStore, Trainer, World
from rollout_backend.step import Step
from rollout_backend.step_services import StepServices
from rollout_backend.tasks import Task

_MOST_LIVES = 12


@dataclass(frozen=True)
class Verdict:
    """What came of a seed. `broken` is the promise that did not hold; None if all did."""

    seed: int
    broken: str | None
    history: tuple[str, ...]
    lives: int
    outcomes: dict[str, int]
    reattached: int


def simulate(seed: int, faults: Faults | None = None) -> Verdict:
    """Plays the history of a seed. The same seed plays the same one."""
    random.seed(seed)  # tenacity's jitter
    draw = random.Random(seed)  # noqa: S311
    logger = logging.getLogger("rollout_backend")  # misfortunes by the hundred
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _, context: None)  # of tasks that died with their trainer
    play = Play(seed, faults)
    try:
        # Session ids follow from a manifest's nonce, and from them the order in which sets of them are gone through.
        nonces = patch.object(secrets, "token_hex", lambda nbytes: draw.randbytes(nbytes).hex())
        with nonces, asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(play.run())
        broken = None
    except Violation as violation:
        broken = str(violation)
    except (Exception, Deadlock) as error:
        broken = f"{type(error).__name__}: {error}"
    finally:
        logger.setLevel(level)
    return Verdict(seed, broken, tuple(play.world.history), play.lives, play.outcomes, play.reattached)


class Play:
    def __init__(self, seed: int, faults: Faults | None) -> None:
        self.world = World(seed, faults)
        draw = self.world.random
        self.config = _config(draw)
        self.checks = Checks(self.world, self.config)
        self.lives = 0
        self.outcomes: dict[str, int] = {}
        self.reattached = 0
        self._with_queue = not self.world.chance("queue_off")
        self._steps = [
            [Task(f"t{step}-{i}", {"q": f"{i}"}) for i in range(draw.randint(1, 4))]  # as epochs do
            for step in range(draw.randint(1, 3))
        ]
        self._done = 0  # steps that the trainer's checkpoint has

    async def run(self) -> None:
        world = self.world
        if world.faults.queue_gone:
            asyncio.get_running_loop().call_later(world.random.random() * 60, self._lose_queue)
        while self._done < len(self._steps):
            self.lives += 1
            if self.lives > 1:
                await world.passes(world.random.choice([0, 5, 40]))  # until somebody starts it again
            trainer = Trainer(self.lives)
            world.starts(trainer)
            world.note(f"trainer {trainer.number} starts at step {self._done}")
            life = asyncio.create_task(self._life(trainer))
            if self.lives < _MOST_LIVES and world.chance("kill"):
                await asyncio.wait({life}, timeout=world.random.random() * world.random.choice([2, 15, 60]))
            else:
                await asyncio.wait({life})
            trainer.alive = False
            if not life.done():
                world.note(f"trainer {trainer.number} is killed")
                life.cancel()
            with contextlib.suppress(Killed, asyncio.CancelledError, StoreError):  # whoever runs it starts it again
                await life
            if self.lives > 5 * _MOST_LIVES:
                raise Violation("the run does not come to its end, however often it is started")
        await asyncio.sleep(60)
        self.checks.run_ended()

    def _lose_queue(self) -> None:
        self.world.note("the queue is deleted")
        self.world.queue_gone = True
        self.world.letters.clear()

    async def _life(self, trainer: Trainer) -> None:
        world = self.world
        store, runtime = SimStore(world, trainer), SimRuntime(world, trainer)
        queue = SimQueue(world, trainer) if self._with_queue else None
        buffer = RolloutBuffer(self.config.run_id, store, queue, 16)  # type: ignore[arg-type]
        breaker = Breaker(self.config.breakers)
        after = self.config.group.set_aside_after
        set_aside = SetAside(store, self.config.run_id, after) if after else None  # type: ignore[arg-type]
        receiving = asyncio.create_task(buffer.run(2))
        try:
            while self._done < len(self._steps):
                await self._step(trainer, store, runtime, queue, buffer, breaker, set_aside)
                self._done += 1
        except CircuitOpen:
            world.note("the breaker opens")
            world.mended()
        finally:
            if receiving.done() and trainer.alive:
                raise Violation(f"nothing is received any more: {receiving.exception()!r}")
            receiving.cancel()

    async def _step(
        self,
        trainer: Trainer,
        store: SimStore,
        runtime: SimRuntime,
        queue: SimQueue | None,
        buffer: RolloutBuffer,
        breaker: Breaker,
        set_aside: SetAside | None,
    ) -> None:
        world, config, number = self.world, self.config, self._done

        async def revoke(sessions: Iterable[str]) -> None:
            if not trainer.alive:
                raise Killed
            world.journal.revoked.update(sessions)

        async def adopt(sessions: Collection[str]) -> None:
            if not trainer.alive:
                raise Killed
            world.adopted.update(sessions)
            for session_id in sorted(sessions):
                world.note(f"goes on: {world.keys[session_id].rollout_id}")

        def endpoint(claims: SessionClaims) -> ModelEndpoint:
            world.keys[claims.session_id] = claims.model_copy(
                update={"epoch": world.journal.epoch, "life": str(trainer.number)}
            )
            return ModelEndpoint(base_url="https://g/v1", api_key="k", name="m", trajectory_url="https://g/t")

        manifests = ManifestStore(store, config.run_id)  # type: ignore[arg-type]
        limits, dispatched = config.runtime, SimDispatched(world, trainer)
        services = StepServices(
            config=config,
            dispatcher=Dispatcher(
                runtime, per_s=limits.invoke_per_s, max_sessions=limits.max_sessions, max_attempts=limits.max_attempts
            ),
            closer=SessionCloser(runtime, limits.stop_per_s),
            buffer=buffer,
            queue_url=queue.url if queue else None,
            endpoint=endpoint,
            revoke=revoke,
            keep=lambda rollout: None,
            read_manifest=manifests.read,
            write_manifest=manifests.write,
            wall=world.wall,
            breaker=breaker,
            set_aside=set_aside,
            gateway=world.journal.epoch,
            dispatched=dispatched,
            adopt=adopt,
        )
        # A restarted trainer draws its tasks' ids anew.
        tasks = [Task(f"{task.task_id}-{trainer.number}", task.payload) for task in self._steps[number]]
        step = Step(number, tasks, services, None)
        if queue is not None:
            queue.on_delete = lambda message: self.checks.deleted(message, step)
        self._watch(step)
        dispatched.wants = step.ledger.wants
        began, finished_before = world.now(), self.checks.finished(number)
        left_out = self.checks.set_aside()
        try:
            result = await step.run()
        except CircuitOpen:
            self.checks.step_stopped(step)
            raise
        self.checks.left_out(step, left_out, began)
        world.note(f"step {number} is over: { {k.value: n for k, n in result.report.outcomes.items() if n} }")
        self.checks.step_ended(step, result, trainer, finished_before, began)
        self.reattached += result.report.reattached
        for outcome, count in result.report.outcomes.items():
            self.outcomes[outcome.value] = self.outcomes.get(outcome.value, 0) + count

    def _watch(self, step: Step) -> None:
        settle, plan = step.ledger.settle, step.ledger.plan

        def planned(rollouts: Iterable[PlannedRollout]) -> None:
            if not step.ledger.entries:
                self.checks.planned()
            plan(rollouts)

        def watched(rollout_id: str, outcome: Outcome, reason: str, message: str = "") -> bool:
            if step.ledger.wants(rollout_id):
                self.checks.settled_here(step, rollout_id, outcome, reason)
                self.world.note(f"settled here: {rollout_id} {outcome} {reason}")
            return settle(rollout_id, outcome, reason, message)

        step.ledger.settle = watched  # type: ignore[method-assign]
        step.ledger.plan = planned  # type: ignore[method-assign]


def _config(draw: random.Random) -> RolloutConfig:
    size = draw.randint(1, 3)
    policy = draw.choice(["strict", "min_viable", "replace"])
    settings: dict[str, Any] = {
        "run_id": "simulated",
        "model": {"path": Path("model")},
        "storage": {"bucket": BUCKET},
        "runtime": {
            "kind": "http",
            "url": "http://agents",
            "invoke_per_s": 10,
            "max_attempts": draw.randint(1, 4),
            "max_sessions": draw.choice([2, 6, 64]),
        },
        "group": {
            "size": size,
            "policy": policy,
            "min_viable": draw.randint(1, size),
            "target_groups": draw.choice([None, None, 1]),
            "extra": draw.choice([0, 0, 1, 2]),
            "straggler_after": draw.choice([None, None, 0.5, 0.9]),
            "straggler_factor": draw.choice([1.0, 2.0]),
            "set_aside_after": draw.choice([None, 1, 1, 2]),
        },
        "breakers": {"consecutive": draw.choice([None, 20, 3]), "over_s": draw.choice([0.0, 0.0, 30.0])},
        "collect": {"quiet_s": 10},
        "timeouts": {
            "model_call_s": 20, "agent_s": 60, "publish_grace_s": 30, "collection_s": draw.choice([120, 300]),
            "token_s": 600,
        },
    }  # fmt: skip
    return RolloutConfig.parse(settings)
