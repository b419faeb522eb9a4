"""Start the services of a run, in order, and connect them for its steps.

Invariants:

- External services are checked before anything is started.
- The run is claimed once everything else has started: see `run_lease`.
- The caller's stack stops everything that was started, even if the start fails or is cancelled.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, NoReturn, TypeVar

from agent_wrapper.contract import RolloutRequest, Trajectory
from agent_wrapper.shared.trajectory import fetch_trajectory
from rollout_backend.agents.protocols.base import PolledResults, ReportedResults, WrittenResults
from rollout_backend.agents.protocols.translator import (
    BucketTranslator,
    PollingTranslator,
    ReportTranslator,
    TranslatorOptions,
    agent_protocol,
)
from rollout_backend.agents.runtimes.base import (
    AgentRuntime,
    SessionCalls,
    VerifierRuntime,
    open_runtime,
    runtime_class,
)
from rollout_backend.base.check_result import raise_problems
from rollout_backend.base.disk import call_disk
from rollout_backend.base.waiting_connections import raise_file_limit
from rollout_backend.config import RolloutConfig, RuntimeConfig
from rollout_backend.core.harbor import VERIFIER
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_ends import Heartbeats, SessionEnds
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.model.serving.model_serving import ModelServing, RunPhase
from rollout_backend.model.serving.run_secret import revealed, run_secret
from rollout_backend.model.serving.supervisor import OnEvent, cancel_all, first_of
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.checks.preflight import Preflight
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.run.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.dispatch.dispatcher import Dispatcher, TimedCalls
from rollout_backend.run.janitor.janitor_process import Janitor
from rollout_backend.run.lease import FencedRuntime, LeaseHolder, RunLease
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.scoring.verifier_jobs import VerifierJobs
from rollout_backend.run.scoring.worker_pool import WorkerPool
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.in_flight import InFlightLog, StepFiles
from rollout_backend.run.step.services import StepServices
from rollout_backend.run.step.task_blocklist import TaskBlocklist

_T = TypeVar("_T")
# A killed gateway restarts within this time.
_SEAL_S = 60.0
# Open files of this process, besides the connections to the runtime.
_OTHER_FILES = 1024


class RunServices:
    """The services of one run. `start` sets the fields."""

    lease: RunLease
    limits: RuntimeConfig
    """The runtime's rates and quotas."""
    agent: Mapping[str, str]
    """What the runtime runs, as far as it is known."""
    serving: ModelServing
    for_steps: StepServices
    background: list[asyncio.Task[None]]
    """Tasks that run as long as the run, and fail when one of its services does."""

    def __init__(
        self,
        config: RolloutConfig,
        archive: RunArchive,
        *,
        on_status: Callable[[str], object],
        on_phase: Callable[[RunPhase], object],
        on_serving: OnEvent,
        wait_lost: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Take the arguments of `RolloutManager`."""
        self._config = config
        self._archive = archive
        self._on_status = on_status
        self._on_phase = on_phase
        self._on_serving = on_serving
        self._wait_lost = wait_lost

    async def start(self, stack: AsyncExitStack, rollouts: int | None = None) -> None:
        """Start everything; `stack` stops it. Refuse a run whose steps of `rollouts` rollouts cannot end in time.

        Raises:
            ConfigError, PreflightError, StartupError, RunHeld, CloudLost: `stack` holds what had been started.
        """
        starting = self._start(stack, rollouts)
        await (starting if self._wait_lost is None else first_of(starting, _forever(self._wait_lost)))

    async def _start(self, stack: AsyncExitStack, rollouts: int | None) -> None:
        config = self._config
        self.serving = await self._read(lambda: ModelServing(config, self._archive.logs, self._on_serving))
        preflight = await self._check(stack, rollouts)
        store = preflight.store
        in_containers = config.scoring.function == VERIFIER and issubclass(
            runtime_class(config.runtime), VerifierRuntime
        )
        scorer = await self._start_scorer(stack, store) if config.scoring.enabled and not in_containers else None
        me, lease_s = LeaseHolder.this_process(), config.janitor.lease_s
        self.lease = RunLease(store, config.run_id, me, lease_s, on_status=self._on_status)
        stack.push_async_callback(self.lease.release)
        await self.lease.begin()
        if (runtime := preflight.runtime) is None:
            runtime = await open_runtime(config.run_runtime, self._on_status)
            stack.push_async_callback(runtime.aclose)
            raise_problems(await runtime.check(config.timeouts.session_s) or ())
        self.limits, self.agent = runtime.limits(), runtime.describe()
        admission = CallQueue.from_config(self.limits)
        admission.lease = self.lease
        secret = await self._read(lambda: run_secret(config))
        janitor = await self._start_janitor(stack, runtime)
        presigner = Presigner(config.storage, config.aws)
        stack.push_async_callback(presigner.aclose)
        verifiers = None
        if in_containers:
            assert isinstance(runtime, VerifierRuntime)
            opened, closed = janitor.session_opened, janitor.session_closed
            verifiers = VerifierJobs(
                runtime, presigner, config.scoring, admission=admission, on_open=opened, on_closed=closed
            )
            stack.push_async_callback(verifiers.aclose)
            scorer = self._scorer(store, verifiers)
        queue = await self._open_queue(stack, janitor) if config.uses_queue else None
        stack.push_async_callback(self.serving.stop)
        await self.serving.start(secret, self._on_phase, self._on_status)
        await self.lease.claim()
        if verifiers is not None:
            await verifiers.stop_earlier(config.run_id)
        sealer = Sealer(secret, revealed(config.gateway.previous_secret)) if config.gateway.require_seal else None
        buffer = RolloutBuffer(
            config.run_id,
            store,
            queue,
            config.collect.max_fetches,
            verify=sealer.check if sealer is not None else None,
        )
        ends = SessionEnds()
        heartbeats = self._start_background(stack, buffer, runtime, ends)
        admission.yield_to(buffer.has_backlog)
        invoke_s, stop_s = config.runtime.invoke_limit_s, config.runtime.stop_limit_s
        if config.runtime.invokes_last:
            invoke_s += config.timeouts.session_s
        raise_file_limit(config.runtime.connections + _OTHER_FILES)
        calls = FencedRuntime(TimedCalls(janitor.watch(runtime), invoke_s, stop_s), self.lease)
        poll = FencedRuntime(TimedCalls(runtime, invoke_s, stop_s), self.lease).invoke
        self.for_steps = StepServices(
            config=config,
            runtime=runtime,
            dispatcher=Dispatcher(
                self._translated(calls, poll, admission, store, buffer, ends),
                admission,
                max_sessions=self.limits.max_sessions,
            ),
            gateways=self.serving.gateways,
            buffer=buffer,
            manifests=ManifestStore(store, config.run_id, self.lease.fencing_token, str(self.lease.me)),
            blocklist=TaskBlocklist(store, config.run_id, config.group.block_task_after),
            archive=self._archive,
            queue_url=queue.url if queue is not None and not config.storage.presigned else None,
            presigner=presigner if config.storage.presigned else None,
            sealed_by=sealer.fingerprints if sealer is not None else (),
            breaker=CircuitBreaker(
                config.circuit_breaker,
                getattr(config.runtime, "ready_timeout_s", 600.0),
            ),
            in_flight=InFlightLog(StepFiles(config.run_dir / "steps")),
            heartbeats=heartbeats,
            session_ends=ends,
            scorer=scorer,
        )

    async def _read(self, work: Callable[[], _T]) -> _T:
        """Return what `work` reads from the run's folder. Raises StartupError if its disk does not answer."""
        try:
            return await call_disk(work)
        except TimeoutError as error:
            raise StartupError(
                f"{self._config.run_dir} cannot be read ({error.strerror}): look at the disk or the network file "
                "system, or set output_dir to another one"
            ) from None

    # --- one service each ---------------------------------------------------------------------------------

    async def _check(self, stack: AsyncExitStack, rollouts: int | None) -> Preflight:
        self._on_phase(RunPhase.CHECK)
        preflight = Preflight(self._config, rollouts)
        await preflight.run(stack, queue=False)
        raise_problems(preflight.findings)
        for finding in preflight.findings:
            if finding.level == "warning":
                self._on_status(f"warning: {finding}")
        return preflight

    async def _start_scorer(self, stack: AsyncExitStack, store: ResultStore) -> RolloutScorer:
        pool = WorkerPool(self._config.scoring, self._archive.logs / "scorer.log")
        stack.push_async_callback(pool.close)
        await pool.start()
        return self._scorer(store, pool)

    def _scorer(self, store: ResultStore, calls: WorkerPool | VerifierJobs) -> RolloutScorer:
        return RolloutScorer(
            store, self._config.run_id, calls.call, calls.name, calls.sha256, self._archive.write_artifacts
        )

    async def _start_janitor(self, stack: AsyncExitStack, runtime: AgentRuntime) -> Janitor:
        lease = self.lease
        janitor = await Janitor.start(self._config, lease, runtime, self._archive.logs / "janitor.log")

        async def stop() -> None:
            # If this start fails, the queue of a dead run is left to the janitors.
            await janitor.aclose(done=lease.lost is not None or await lease.may_delete_queue())

        stack.push_async_callback(stop)
        return janitor

    async def _open_queue(self, stack: AsyncExitStack, janitor: Janitor) -> AnnouncementQueue:
        config = self._config
        queue = await AnnouncementQueue.open(config.queue, config.aws, queue_name(config.storage, config.run_id))

        async def close() -> None:
            await queue.aclose(delete=await self.lease.may_delete_queue())

        stack.push_async_callback(close)
        janitor.queue_made(queue)
        return queue

    # --- the run's background -----------------------------------------------------------------------------

    def _start_background(
        self, stack: AsyncExitStack, buffer: RolloutBuffer, runtime: AgentRuntime, ends: SessionEnds
    ) -> Heartbeats:
        """Receive announcements, heartbeats and ends of sessions, and watch every service that can fail."""
        config, gateways = self._config, self.serving.gateways
        every_s = config.timeouts.heartbeat_s
        heartbeats = Heartbeats(every_s or math.inf, config.gateway.processes, same_machine=gateways.same_machine)
        work: list[Coroutine[Any, Any, None]] = [
            buffer.run(config.queue.receivers),
            *self.serving.failures(),
            self.lease.wait_lost(),
            runtime.watch_sessions(config.run_id, ends.report),
        ]
        if every_s is not None:
            work.append(heartbeats.poll(gateways.heartbeats))
        if self._wait_lost is not None:
            work.append(_forever(self._wait_lost))
        self.background = [asyncio.create_task(each) for each in work]
        stack.push_async_callback(cancel_all, self.background)
        return heartbeats

    def failure(self) -> BaseException:
        """Return why a background task has ended."""
        for task in self.background:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                while isinstance(error, BaseExceptionGroup):
                    # The first error has ended the other tasks.
                    error = error.exceptions[0]
                return error
        return ServingError("a background task of the run ended without an error: see the logs")

    # --- agents of other protocols ------------------------------------------------------------------------

    def _translated(
        self,
        calls: SessionCalls,
        poll: Callable[[str, bytes], Awaitable[bytes]],
        admission: CallQueue,
        store: ResultStore,
        buffer: RolloutBuffer,
        ends: SessionEnds,
    ) -> SessionCalls:
        """Return the calls of steps. For agents of another protocol, start to translate their results."""
        config, gateways = self._config, self.serving.gateways
        protocol = agent_protocol(config.runtime.agent_protocol)
        if protocol is None:
            return calls

        async def seal(request: RolloutRequest) -> Trajectory:
            endpoint = request.endpoint
            # A certificate would be valid only for the public name.
            if config.gateway.tls_certificate is None:
                url = gateways.trajectory_url(request.session_id)
                endpoint = endpoint.model_copy(update={"trajectory_url": url})
            return await fetch_trajectory(endpoint, _SEAL_S)

        more: TranslatorOptions = {
            "interval_s": config.collect.list_interval_s,
            "max_writes": config.collect.max_fetches,
            "seal": seal,
            "on_result": buffer.fetch_written,
        }
        translator: PollingTranslator | BucketTranslator | ReportTranslator
        if isinstance(protocol, ReportedResults):
            translator = ReportTranslator(
                calls,
                protocol,
                store,
                gateways,
                ends.report,
                accept_s=config.runtime.read_timeout_s,
                scored=config.scoring.enabled,
                **more,
            )
        elif isinstance(protocol, PolledResults):
            more["interval_s"] = config.runtime.poll_interval_s
            translator = PollingTranslator(calls, protocol, store, poll, admission, **more)
        else:
            assert isinstance(protocol, WrittenResults)
            translator = BucketTranslator(calls, protocol, store, **more)
        self.background.append(asyncio.create_task(translator.run()))
        return translator


async def _forever(wait_lost: Callable[[], Awaitable[None]]) -> NoReturn:
    while True:
        await wait_lost()
