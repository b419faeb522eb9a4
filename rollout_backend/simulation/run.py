"""One history: a trainer that collects its steps, is killed and restarts, in the simulated world of a seed."""

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

from agent_wrapper.contract import Announcement, ModelEndpoint, Outcome
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.config import RolloutConfig
from rollout_backend.core.circuit_breaker import CircuitBreaker
from rollout_backend.core.heartbeats import HeartbeatReport, Heartbeats
from rollout_backend.core.ledger import PlannedRollout, ResultStatus
from rollout_backend.core.report import StepResult
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen, RunHeld, StoreError
from rollout_backend.run_lease import FencedRuntime, LeaseHolder, RunLease
from rollout_backend.simulation.checks import Checks, Violation
from rollout_backend.simulation.clock import Deadlock, VirtualLoop
from rollout_backend.simulation.faults import Faults
from rollout_backend.simulation.world import (
    BUCKET,
    HEARTBEAT_S,
    LEASE_S,
    Killed,
    SimArchive,
    SimInFlightLog,
    SimQueue,
    SimRuntime,
    SimStore,
    Trainer,
    World,
)
from rollout_backend.step.services import StepServices
from rollout_backend.step.step import Step

_MOST_LIVES = 12


@dataclass(frozen=True)
class Verdict:
    """The result of a seed. `broken` is the first violation; None if there was none."""

    seed: int
    broken: str | None
    history: tuple[str, ...]
    lives: int
    outcomes: dict[str, int]
    reattached: int


def simulate(seed: int, faults: Faults | None = None) -> Verdict:
    """Play the history of a seed. It is deterministic."""
    random.seed(seed)  # tenacity's jitter
    draw = random.Random(seed)  # noqa: S311
    logger = logging.getLogger("rollout_backend")  # hundreds of planned faults would be logged
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _, context: None)  # tasks of killed trainers fail
    play = Play(seed, faults)
    try:
        # Session ids follow from a manifest's nonce, and the iteration order of sets follows from session ids.
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
        planned = _planned(seed)
        self.world = World(seed, faults, planned)
        draw = self.world.random
        self.config = _config(draw, planned)
        self.checks = Checks(self.world, self.config)
        self.lives = 0
        self.outcomes: dict[str, int] = {}
        self.reattached = 0
        self._with_queue = not self.world.chance("queue_off")
        self._steps = [
            [Task(f"t{step}-{i}", {"q": f"{i}"}) for i in range(_tasks(draw, planned, self.config.group.size))]
            for step in range(
                draw.randint(1, 3 if planned is None else 2)
            )  # the same tasks in each step, as in epochs
        ]
        self._done = 0  # steps that the trainer's checkpoint has

    async def run(self) -> None:
        world = self.world
        if world.faults.queue_gone:
            asyncio.get_running_loop().call_later(world.random.random() * 60, self._lose_queue)
        chattering = asyncio.create_task(self._chatter()) if world.faults.chatter else None
        while self._done < len(self._steps):
            if self.lives:
                await world.passes(world.random.choice([0, 5, 40]))  # until the supervisor restarts it
            trainer = self._trainer("here")
            life = asyncio.create_task(self._life(trainer))
            rival = asyncio.create_task(self._rival(trainer)) if world.chance("rival") else None
            if self.lives < _MOST_LIVES and world.chance("kill"):
                await asyncio.wait({life}, timeout=world.random.random() * world.random.choice([2, 15, 60]))
            else:
                await asyncio.wait({life})
            trainer.alive, trainer.ended_at = False, world.now()
            if not life.done():
                world.note(f"trainer {trainer.number} is killed")
                life.cancel()
            with contextlib.suppress(Killed, asyncio.CancelledError):  # the supervisor restarts it
                await life
            if rival is not None:
                await rival
            if self.lives > 5 * _MOST_LIVES:
                raise Violation(f"the run does not end after {self.lives} starts")
        if chattering is not None:
            chattering.cancel()
        await asyncio.sleep(60)
        self.checks.run_ended()

    def _trainer(self, machine: str) -> Trainer:
        self.lives += 1
        trainer = Trainer(self.lives, machine)
        self.world.trainers[trainer.number] = trainer
        self.world.note(f"trainer {trainer.number} starts {machine} at step {self._done}")
        return trainer

    async def _rival(self, first: Trainer) -> None:
        """Start the run on another machine, too."""
        world = self.world
        await world.passes(30)
        if world.chance("s3_cut_off"):
            first.cut_off_until = world.now() + 60 + world.random.random() * 180
            world.note(f"trainer {first.number} cannot reach S3 until {first.cut_off_until:.0f}")
        second = self._trainer("elsewhere")
        await self._life(second)
        second.alive, second.ended_at = False, world.now()

    async def _chatter(self) -> None:
        """Send announcements of a step that is not collected, so that the queue is never idle."""
        while True:
            await self.world.passes(8)
            self.world.send(Announcement(bucket=BUCKET, key=self.checks.key(99, "another.0")).encode())

    def _lose_queue(self) -> None:
        self.world.note("the queue is deleted")
        self.world.queue_gone = True
        self.world.letters.clear()

    async def _life(self, trainer: Trainer) -> None:
        store = SimStore(self.world, trainer)

        def dead(holder: LeaseHolder) -> bool:
            return holder.machine == trainer.machine and not self.world.trainers[holder.pid].alive

        me = self.world.holder_of(trainer)
        lease = RunLease(store, self.config.run_id, me, LEASE_S, is_dead=dead)
        try:
            await lease.begin()
            await self.world.passes(3)  # engines, router, gateway
            await lease.claim()
            self.world.starts(trainer)
            await self._work(trainer, store, lease)
        except RunHeld:
            self.world.note(f"trainer {trainer.number} is refused or has lost the run")
            others = [each for each in self.world.trainers.values() if each is not trainer]
            recent = self.world.now() - 2 * LEASE_S
            another = any(each.alive or each.ended_at > recent for each in others)
            # A trainer that was cut off may learn late that another one took over the run and finished it.
            self.checks.refused(me.id, another=another or lease.held or trainer.cut_off_until > 0)
        finally:
            if trainer.alive:
                await lease.release()

    async def _work(self, trainer: Trainer, store: SimStore, lease: RunLease) -> None:
        world = self.world
        runtime = _AskedRuntime(SimRuntime(world, trainer), lease)
        runtime.asked_for = world.asked_for
        queue = SimQueue(world, trainer) if self._with_queue else None
        buffer = RolloutBuffer(self.config.run_id, store, queue, 16)  # type: ignore[arg-type]
        # If heartbeats may be cut off, the agents are on other machines.
        heartbeats = Heartbeats(HEARTBEAT_S, same_machine=not world.faults.cut_off)

        async def heard() -> list[HeartbeatReport | None]:
            if not trainer.alive:
                raise Killed
            return [world.heard(trainer)]

        services = self._services(trainer, store, runtime, queue, buffer, heartbeats, lease)
        listening = asyncio.create_task(heartbeats.poll(heard))
        receiving = asyncio.create_task(buffer.run(2))
        try:
            while self._done < len(self._steps):
                await self._step(trainer, services, queue, lease)
                self._done += 1
        except CircuitOpen:
            world.note("the breaker opens")
            world.repair_tasks()
        finally:
            if receiving.done() and trainer.alive:
                raise Violation(f"the receivers have ended: {receiving.exception()!r}")
            receiving.cancel()
            listening.cancel()

    def _services(
        self,
        trainer: Trainer,
        store: SimStore,
        runtime: FencedRuntime,
        queue: SimQueue | None,
        buffer: RolloutBuffer,
        heartbeats: Heartbeats,
        lease: RunLease,
    ) -> StepServices:
        world, config = self.world, self.config

        async def revoke(sessions: Iterable[str]) -> None:
            if not trainer.alive:
                raise Killed
            world.journal.revoked.update(sessions)

        async def adopt(sessions: Collection[str]) -> None:
            if not trainer.alive:
                raise Killed
            world.adopted.update(sessions)
            for session_id in sorted(sessions):
                world.note(f"adopted: {world.keys[session_id].rollout_id}")

        def endpoint(claims: SessionClaims) -> ModelEndpoint:
            world.keys[claims.session_id] = claims.model_copy(
                update={"journal_id": world.journal.journal_id, "trainer_incarnation": str(trainer.number)}
            )
            return ModelEndpoint(base_url="https://g/v1", api_key="k", name="m", trajectory_url="https://g/t")

        return StepServices.assemble(
            config,
            runtime,
            store,  # type: ignore[arg-type]
            fencing_token=lease.fencing_token,
            owner=str(lease.me),
            buffer=buffer,
            queue_url=queue.url if queue else None,
            endpoint=endpoint,
            revoke=revoke,
            archive=SimArchive(world).write_rollout,
            wall=world.wall,
            breaker=CircuitBreaker(config.circuit_breaker),
            heartbeats=heartbeats,
            gateway=world.journal.journal_id,
            in_flight=SimInFlightLog(world, trainer),
            adopt=adopt,
        )

    async def _step(self, trainer: Trainer, services: StepServices, queue: SimQueue | None, lease: RunLease) -> None:
        world, number = self.world, self._done
        # A restarted trainer gives its tasks new ids.
        tasks = [Task(f"{task.task_id}-{trainer.number}", task.payload) for task in self._steps[number]]
        step = Step(number, tasks, services, None)
        if queue is not None:
            queue.on_delete = lambda message: self.checks.deleted(message, step)
        self._watch(step)
        assert isinstance(services.in_flight, SimInFlightLog)
        services.in_flight.is_open = step.ledger.is_open
        began, finished_before = world.now(), self.checks.finished(number)
        left_out = self.checks.blocked()
        try:
            result = await _unless_lost(step, lease)
        except CircuitOpen:
            self.checks.step_stopped(step)
            raise
        except StoreError:
            self.checks.gave_up(began)
            raise
        if world.holder != lease.me.id:
            raise Violation("a step returns to a manager that has lost the run")
        self.checks.left_out(step, left_out, began)
        world.note(f"step {number} is over: { {k.value: n for k, n in result.report.outcomes.items() if n} }")
        self.checks.step_ended(step, result, trainer, finished_before, began)
        self.reattached += result.report.reattached
        for outcome, count in result.report.outcomes.items():
            self.outcomes[outcome.value] = self.outcomes.get(outcome.value, 0) + count

    def _watch(self, step: Step) -> None:
        settle, plan, record_result = step.ledger.settle, step.ledger.plan, step.ledger.record_result

        def planned(rollouts: Iterable[PlannedRollout]) -> None:
            if not step.ledger.entries:
                self.checks.planned()
            plan(rollouts)

        def watched(rollout_id: str, outcome: Outcome, reason: str, message: str = "") -> bool:
            if step.ledger.is_open(rollout_id):
                self.checks.settled_here(step, rollout_id, outcome, reason)
                self.world.note(f"settled here: {rollout_id} {outcome} {reason}")
            return settle(rollout_id, outcome, reason, message)

        def arrived(rollout_id: str, *more: Any, **named: Any) -> ResultStatus:
            found = record_result(rollout_id, *more, **named)
            if found is ResultStatus.FIRST:
                self.checks.arrived(step)
            return found

        step.ledger.record_result = arrived  # type: ignore[method-assign]
        step.ledger.settle = watched  # type: ignore[method-assign]
        step.ledger.plan = planned  # type: ignore[method-assign]


class _AskedRuntime(FencedRuntime):
    """A fenced runtime that records which sessions its step asks for.

    If an invoke is cancelled while it waits for the run's lease, the step cannot know that it was not sent, and stops
    its session.
    """

    asked_for: set[str]

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self.asked_for.add(session_id)
        return await super().invoke(session_id, payload)


async def _unless_lost(step: Step, lease: RunLease) -> StepResult:
    """Run the step until the run is lost, as the manager does."""
    running, losing = asyncio.create_task(step.run()), asyncio.create_task(lease.wait_lost())
    try:
        await asyncio.wait({running, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            assert lease.lost is not None
            step.abort(lease.lost)
        result = await running
        await lease.try_to_confirm()
        return result
    finally:
        for task in (running, losing):
            task.cancel()
        await asyncio.gather(running, losing, return_exceptions=True)


def _planned(seed: int) -> int | None:
    """Return how many rollouts a step of this seed's history plans; None for a small step of a random size.

    Large steps meet what small ones cannot: a backlog of announcements, listings of several pages, more sessions than
    a quota grants, and minutes of dispatching during which the trainer is killed.
    """
    if seed % 500 == 499:
        return 1024
    return 256 if seed % 25 == 24 else None


def _tasks(draw: random.Random, planned: int | None, size: int) -> int:
    return draw.randint(1, 4) if planned is None else -(-planned // size)


def _config(draw: random.Random, planned: int | None) -> RolloutConfig:
    size = draw.randint(1, 3) if planned is None else draw.choice([4, 8])
    policy = draw.choice(["strict", "min_viable", "replace"])
    settings: dict[str, Any] = {
        "run_id": "simulated",
        "model": {"path": Path("model")},
        "storage": {"bucket": BUCKET},
        "runtime": {
            "kind": "http",
            "url": "http://agents",
            "invoke_per_s": 10 if planned is None else 50,
            "max_attempts": draw.randint(1, 4),
            "max_sessions": draw.choice([2, 6, 64] if planned is None else [planned // 4, 2 * planned]),
        },
        "group": {
            "size": size,
            "policy": policy,
            "min_viable": draw.randint(1, size),
            "target_groups": draw.choice([None, None, 1]) if planned is None else None,
            "oversample": draw.choice([0, 0, 1, 2]),
            "straggler_after": draw.choice([None, None, 0.5, 0.9]),
            "straggler_factor": draw.choice([1.0, 2.0]),
            "block_task_after": draw.choice([None, 1, 1, 2]),
        },
        "circuit_breaker": {"max_failures": draw.choice([None, 20, 3]), "min_span_s": draw.choice([0.0, 0.0, 30.0])},
        "collect": {"list_after_idle_s": 10},
        "timeouts": {
            "model_call_s": 20, "agent_s": 60, "publish_grace_s": 30,
            "collection_s": draw.choice([120, 300] if planned is None else [300, 600]),
            "token_s": 900, "heartbeat_s": HEARTBEAT_S,
        },
    }  # fmt: skip
    return RolloutConfig.parse(settings)
