"""One trainer process: it takes the run, collects the steps that are left, and may be killed at any time.

It runs the production code: lease, step services, buffer, heartbeats and steps. Only the clients of S3, SQS, runtime
and gateway are simulated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

from agent_wrapper.contract import RolloutRequest, Trajectory
from rollout_backend.agents.protocols.translator import (
    BucketTranslator,
    PollingTranslator,
    ReportTranslator,
    Translator,
    TranslatorOptions,
)
from rollout_backend.agents.runtimes.base import SessionCalls
from rollout_backend.core.ledger import LedgerEntry, Phase
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.session_ends import Heartbeats, SessionEnd, SessionEnds
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen, RunHeld, StoreError
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.fetcher import ResultSink
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.dispatch.dispatcher import Dispatcher, TimedCalls
from rollout_backend.run.lease import FencedRuntime, LeaseHolder, RunLease
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.services import StepServices
from rollout_backend.run.step.step import Step
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from tests.simulation.agent_sources import JobRuntime, RuntimeApp, Toolkit
from tests.simulation.agents import segments_of
from tests.simulation.call_audit import AuditedQueue
from tests.simulation.checks import Checks, Violation
from tests.simulation.gateway import HEARTBEAT_S, SimGateway
from tests.simulation.run_directory import SimArchive, SimInFlightLog
from tests.simulation.run_holder import LEASE_S
from tests.simulation.runtime import SimRuntime
from tests.simulation.s3 import SimStore
from tests.simulation.scenario import Scenario
from tests.simulation.scorer import NAME, SHA256
from tests.simulation.sqs import SimQueue
from tests.simulation.trainer import Killed, Trainer
from tests.simulation.world import World

MOST_KILLS = 12
INVOKE_S, STOP_S = 60.0, 30.0  # limits of the runtime's calls
_ACCEPT_S = 10.0  # an agent of the job runtime that has not answered by then counts as started


@dataclass
class Progress:
    """What outlives a trainer process: its checkpoints, and the totals of its reports."""

    # The newest is the last.
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint(0, "initial")])
    outcomes: Counter[str] = field(default_factory=Counter)
    reattached: int = 0

    @property
    def steps(self) -> int:
        """Return how many steps a restarted trainer need not train again."""
        return self.checkpoints[-1].steps


@dataclass(frozen=True)
class Checkpoint:
    """The weights after a number of steps. They are named by the trainer that trained them."""

    steps: int
    weights: str


class TrainerProcess:
    """The program of one trainer. `run` it once."""

    def __init__(
        self, world: World, scenario: Scenario, checks: Checks, progress: Progress, trainer: Trainer
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._config = scenario.config
        self._checks = checks
        self._progress = progress
        self._trainer = trainer
        self._store = SimStore(world.bucket, trainer)
        self._queue = SimQueue(world.queue, trainer) if scenario.with_queue else None
        self._gateway = SimGateway(world.gateway, trainer, world.sources)
        self._in_flight = SimInFlightLog(world.run_directory, world.audit, trainer)
        me = trainer.holder(world.wall())
        self._lease = RunLease(self._store, self._config.run_id, me, LEASE_S, is_dead=self._is_dead)

    def _is_dead(self, holder: LeaseHolder) -> bool:
        return holder.machine == self._trainer.machine and not self._world.trainers[holder.pid].alive

    async def run(self) -> None:
        """Hold the run and collect its steps, unless another manager holds it."""
        world, trainer, lease = self._world, self._trainer, self._lease
        try:
            if await self._takes_the_run():
                await self._collect()
        except RunHeld:
            world.note(f"trainer {trainer.number} is refused or has lost the run")
            others = [each for each in world.trainers.values() if each is not trainer]
            recent = world.now() - 2 * LEASE_S
            another = any(each.alive or each.ended_at > recent for each in others)
            # A trainer that was cut off may learn late that another one took over the run and finished it.
            self._checks.refused(trainer.id, another=another or lease.held or trainer.cut_off_until > 0)
        finally:
            if trainer.alive:
                await lease.release()

    async def _takes_the_run(self) -> bool:
        """Take the run. Return False if S3 does not answer for minutes; the supervisor restarts the run then."""
        for take in (self._lease.begin, self._lease.claim):
            began = self._world.now()
            try:
                await take()
            except StoreError:
                self._world.note(f"trainer {self._trainer.number} does not start, because S3 does not answer")
                self._checks.gave_up_start(began)
                return False
            await self._world.passes(3)  # engines, router, gateway
        return True

    async def _collect(self) -> None:
        """Collect all steps after the checkpoint."""
        world, progress = self._world, self._progress
        if len(progress.checkpoints) > 1 and world.faults.checkpoint_lost and world.chance("checkpoint_lost"):
            progress.checkpoints.pop()
        first = progress.steps
        world.start_trainer(self._trainer, progress.checkpoints[-1].weights)
        # If heartbeats may be cut off, the agents are on other machines.
        heartbeats = Heartbeats(HEARTBEAT_S, same_machine=not self._world.faults.cut_off)
        buffer = _SweepingBuffer(self._config.run_id, self._store, self._queue, 16)
        services = self._services(buffer, heartbeats)
        listening = asyncio.create_task(heartbeats.poll(self._gateway.heard))
        receiving = asyncio.create_task(buffer.run(2))
        translating = None if self._translator is None else asyncio.create_task(self._translator.run())
        try:
            for number in range(first, len(self._scenario.steps)):
                await self._collect_step(number, number == first, services, buffer)
                self._train(number)
        except CircuitOpen:
            self._world.note("the breaker opens")
            self._world.runtime.repair()
        except StoreError:  # `checks` has seen that the step's deadline had passed; the supervisor restarts the run
            self._world.note(f"trainer {self._trainer.number} gives up, because S3 does not answer")
        finally:
            if receiving.done() and self._trainer.alive:
                raise Violation(f"the receivers have ended: {receiving.exception()!r}")
            receiving.cancel()
            listening.cancel()
            if translating is not None:
                if translating.done() and self._trainer.alive:
                    raise Violation(f"the translator has ended: {translating.exception()!r}")
                translating.cancel()

    def _train(self, number: int) -> None:
        """Train the step's rollouts, and write a checkpoint. Raises Killed."""
        world, faults, done = self._world, self._world.faults, number + 1
        world.gateway.weights = f"{self._trainer.id} after step {number}"
        if done == len(self._scenario.steps) or not (faults.unsaved and world.chance("unsaved")):
            self._progress.checkpoints.append(Checkpoint(done, world.gateway.weights))
        if faults.killed_after_step and len(world.trainers) < MOST_KILLS and world.chance("killed_after_step"):
            self._trainer.alive = False
            raise Killed

    def _services(self, buffer: RolloutBuffer, heartbeats: Heartbeats) -> StepServices:
        world, config = self._world, self._config
        runtime, calls = SimRuntime(world.runtime, self._trainer), AuditedQueue.from_config(config.runtime)
        calls.evidence = world.evidence
        calls.lease = self._lease
        calls.yield_to(buffer.has_backlog)
        ends = SessionEnds()
        invoke_s = INVOKE_S + (config.timeouts.session_s if config.runtime.invokes_last else 0.0)
        fenced = FencedRuntime(TimedCalls(runtime, invoke_s, STOP_S), self._lease)
        self._translator = self._translated(fenced, calls, buffer, ends)
        return StepServices(
            config=config,
            runtime=runtime,
            dispatcher=Dispatcher(self._translator or fenced, calls, max_sessions=config.runtime.max_sessions),
            gateways=self._gateway,
            buffer=buffer,
            manifests=ManifestStore(self._store, config.run_id, self._lease.fencing_token, str(self._lease.me)),
            blocklist=TaskBlocklist(self._store, config.run_id, config.group.block_task_after),
            archive=SimArchive(world),
            queue_url=self._queue.url if self._queue else None,
            breaker=CircuitBreaker(config.circuit_breaker),
            in_flight=self._in_flight,
            heartbeats=heartbeats,
            session_ends=ends,
            scorer=self._scorer() if self._scenario.scored else None,
            wall=world.wall,
        )

    def _translated(
        self, fenced: FencedRuntime, calls: CallQueue, buffer: RolloutBuffer, ends: SessionEnds
    ) -> Translator[Any] | None:
        """Return the calls of steps for agents of another protocol, as the services of a run do."""
        config = self._config
        more: TranslatorOptions = {
            "interval_s": config.collect.list_interval_s,
            "max_writes": config.collect.max_fetches,
            "seal": self._seal,
            "on_result": buffer.fetch_written,
        }
        match config.runtime.agent_protocol:
            case "agentcore-rl-toolkit":
                return BucketTranslator(fenced, Toolkit(), self._store, **more)
            case "agentcore-runtime-app":
                more["interval_s"] = config.runtime.poll_interval_s
                return PollingTranslator(fenced, RuntimeApp(), self._store, fenced.invoke, calls, **more)
            case "sagemaker-job-runtime":
                return _AuditedReports(self._world, fenced, self._store, self._gateway, ends.report, **more)
        return None

    async def _seal(self, request: RolloutRequest) -> Trajectory:
        calls = await self._gateway.seal(request)
        return Trajectory(model="m", segments=segments_of(request, calls))

    def _scorer(self) -> RolloutScorer:
        return RolloutScorer(self._store, self._config.run_id, self._call_scorer, NAME, SHA256)

    async def _call_scorer(self, request: bytes) -> dict[str, Any]:
        self._trainer.require_alive()
        return await self._world.scorer.call(request)

    async def _collect_step(
        self, number: int, is_first: bool, services: StepServices, buffer: _SweepingBuffer
    ) -> None:
        """`is_first`: the weights are those of the checkpoint, so an earlier trainer may have sampled them."""
        world, checks, trainer = self._world, self._checks, self._trainer
        # A restarted trainer gives its tasks new ids.
        drawn, suffix = self._scenario.steps[number], f"-{trainer.number}"
        tasks = tuple(Task(f"{task.task_id}{suffix}", task.payload, priority=task.priority) for task in drawn)
        sampling = services.config.sampling
        step = Step(StepRequest(number, tasks, sampling, weights=f"{number}", same_weights=is_first), services)
        self._watch(step, buffer)
        began, finished_before = world.now(), checks.finished(number)
        left_out = checks.blocked()
        try:
            result = await _unless_lost(step, self._lease)
        except CircuitOpen:
            checks.step_stopped(step)
            raise
        except StoreError:
            checks.gave_up(began)
            raise
        if world.holder.id != trainer.id:
            raise Violation("a step returns to a manager that has lost the run")
        checks.left_out(step, left_out, began)
        world.note(f"step {number} is over: { {k.value: n for k, n in result.report.outcomes.items() if n} }")
        checks.step_ended(step, result, trainer, finished_before, began)
        self._progress.reattached += result.report.reattached
        self._progress.outcomes.update({outcome.value: n for outcome, n in result.report.outcomes.items()})

    def _watch(self, step: Step, buffer: _SweepingBuffer) -> None:
        """Check each change of the step's ledger, and each message that it deletes."""
        checks, ledger = self._checks, step.ledger
        count, plan = ledger.count, ledger.plan

        def planned(*rollout: Any, **more: Any) -> LedgerEntry:
            if not ledger.entries:
                checks.planned(step)
            return plan(*rollout, **more)

        def counted(entry: LedgerEntry, before: Phase) -> None:
            count(entry, before)
            if entry.phase is not Phase.SETTLED:
                return
            try:
                if entry.by_result:
                    checks.arrived(step, sweeping=buffer.sweeps > 0)
                    checks.lost_by_agent(self._trainer, entry)
                    return
                assert entry.outcome is not None
                checks.settled_here(step, entry.rollout_id, entry.outcome, entry.reason)
            except Violation as found:  # raised here, it would leave the rollout's task waiting for ever
                asyncio.get_running_loop().call_soon(step.early_end.abort, found)
            if not entry.by_result:
                self._world.note(f"settled here: {entry.rollout_id} {entry.outcome} {entry.reason}")

        ledger.count = counted  # type: ignore[method-assign]
        ledger.plan = planned  # type: ignore[method-assign]
        self._in_flight.awaits_result = ledger.awaits_result
        if self._queue is not None:
            self._queue.on_delete = lambda message: checks.deleted(message, step)


class _SweepingBuffer(RolloutBuffer):
    """A buffer that counts the sweeps that are in progress."""

    sweeps = 0

    async def sweep(self, sink: ResultSink) -> bool:
        self.sweeps += 1
        try:
            return await super().sweep(sink)
        finally:
            self.sweeps -= 1


class _AuditedReports(ReportTranslator):
    """A translator that records which sessions count as started, and for which it looks a last time."""

    def __init__(
        self,
        world: World,
        calls: SessionCalls,
        store: SimStore,
        reports: SimGateway,
        on_end: Callable[[SessionEnd], None],
        **options: Unpack[TranslatorOptions],
    ) -> None:
        super().__init__(calls, JobRuntime(), store, reports, on_end, accept_s=_ACCEPT_S, scored=False, **options)
        self._world = world

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        answer = await super().invoke(session_id, payload)
        if session_id in self._world.sessions:
            self._world.sessions[session_id].accepted = True
        return answer

    async def find_result(self, session_id: str, *, ended: bool) -> bool:
        self._world.sources.last_looks.add(session_id)
        return await super().find_result(session_id, ended=ended)


async def _unless_lost(step: Step, lease: RunLease) -> StepResult:
    """Run the step until the run is lost, as the manager does."""
    running, losing = asyncio.create_task(step.run()), asyncio.create_task(lease.wait_lost())
    try:
        await asyncio.wait({running, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            assert lease.lost is not None
            step.early_end.abort(lease.lost)
        result = await running
        await lease.try_to_confirm()
        return result
    finally:
        for task in (running, losing):
            task.cancel()
        await asyncio.gather(running, losing, return_exceptions=True)
