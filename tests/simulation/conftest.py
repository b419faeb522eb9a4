"""Single steps in the simulated world, for faults that a test places exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollout_backend.config import RolloutConfig
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.tasks import Task
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.dispatch.dispatcher import Dispatcher, TimedCalls
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.services import StepServices
from rollout_backend.run.step.step import Step
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from tests.simulation.clock import VirtualLoop
from tests.simulation.faults import Faults
from tests.simulation.gateway import SimGateway
from tests.simulation.run_directory import SimArchive, SimInFlightLog
from tests.simulation.runtime import SimRuntime
from tests.simulation.s3 import BUCKET, SimStore
from tests.simulation.sqs import SimQueue
from tests.simulation.trainer import Trainer
from tests.simulation.trainer_process import INVOKE_S, STOP_S
from tests.simulation.world import World

T = TypeVar("T")


def sim_config(**sections: Any) -> RolloutConfig:
    """Settings with the defaults of production where `sections` do not say otherwise."""
    base: dict[str, Any] = {
        "run_id": "simulated",
        "model": {"path": Path("model")},
        "storage": {"bucket": BUCKET},
        "runtime": {"kind": "http", "url": "http://agents"},
        "group": {"size": 8},
        "timeouts": {
            "model_call_s": 20, "agent_s": 300, "publish_grace_s": 60, "collection_s": 1800, "session_key_s": 3600,
        },
    }  # fmt: skip
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return RolloutConfig.parse(base)


class SimRun:
    """One life of a trainer in a world, and its steps."""

    def __init__(self, config: RolloutConfig, world: World | None = None, number: int = 1) -> None:
        self.config = config
        self.world = world or World(1, Faults())
        self.trainer = Trainer(number)
        self.world.start_trainer(self.trainer)
        self.store = SimStore(self.world.bucket, self.trainer)
        self.runtime = SimRuntime(self.world.runtime, self.trainer, max_sessions=100_000)
        gateway = SimGateway(self.world.gateway, self.trainer, self.world.sources)
        queue = SimQueue(self.world.queue, self.trainer)
        self.buffer = RolloutBuffer(config.run_id, self.store, queue, config.collect.max_fetches)
        self.receiving = asyncio.create_task(self.buffer.run(config.queue.receivers))
        self.breaker = CircuitBreaker(config.circuit_breaker)
        calls = CallQueue.from_config(config.runtime)
        calls.yield_to(self.buffer.has_backlog)
        self.services = StepServices(
            config=config,
            runtime=self.runtime,
            dispatcher=Dispatcher(
                TimedCalls(self.runtime, INVOKE_S, STOP_S), calls, max_sessions=config.runtime.max_sessions
            ),
            gateways=gateway,
            buffer=self.buffer,
            manifests=ManifestStore(self.store, config.run_id),
            blocklist=TaskBlocklist(self.store, config.run_id, config.group.block_task_after),
            archive=SimArchive(self.world),
            queue_url=queue.url,
            breaker=self.breaker,
            in_flight=SimInFlightLog(self.world.run_directory, self.world.audit, self.trainer),
            wall=self.world.wall,
        )

    def step(self, tasks: int, number: int = 0) -> Step:
        made = tuple(Task(f"t{i}-{self.trainer.number}", {"q": f"{i}"}) for i in range(tasks))
        return Step(StepRequest(number, made, self.config.sampling), self.services)

    async def killed_at(self, step: Step, seconds: float) -> None:
        """Run the step, and kill its trainer after `seconds`."""
        running = asyncio.create_task(step.run())
        await asyncio.wait({running}, timeout=seconds)
        self.trainer.alive = False
        for task in (running, self.receiving):
            task.cancel()
        await asyncio.gather(running, self.receiving, return_exceptions=True)


@pytest.fixture
def make_run() -> type[SimRun]:
    return SimRun


@pytest.fixture
def make_config() -> Callable[..., RolloutConfig]:
    return sim_config


@pytest.fixture
def play() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine in virtual time."""

    def run(work: Coroutine[Any, Any, T]) -> T:
        loop = VirtualLoop()
        loop.set_exception_handler(lambda _, context: None)  # of tasks that died with their trainer
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(work)

    return run
