"""The composition root: starts what a run needs, collects steps, and ends everything it started.

    async with RolloutManager(config) as manager:
        step = await manager.collect(tasks)

    with RolloutManager.blocking(config) as manager:  # the same, for code that has no event loop
        step = manager.collect(tasks)

What must always hold: what outside this process the run needs is checked before anything is started; whatever ends
the run, no server, session or queue of ours is left behind; if it is killed, the janitor sees to the last two.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from agent_wrapper.contract import Sampling
from rollout_backend.breaker import Breaker, log_place
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.manifests import ManifestStore
from rollout_backend.collect.presign import Presigner
from rollout_backend.collect.queue import AnnouncementQueue
from rollout_backend.collect.retokenise import Retokeniser
from rollout_backend.collect.set_aside import SetAside
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import RolloutConfig
from rollout_backend.dispatch.closer import SessionCloser
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatched import Dispatched
from rollout_backend.errors import CircuitOpen, ServingError
from rollout_backend.gateway.seal import Sealer
from rollout_backend.gateway.secret import key_secret, run_secret
from rollout_backend.gateway.shards import GatewayFleet
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.janitor.owner import Janitor
from rollout_backend.ledger import Phase
from rollout_backend.observe.archive import RunArchive
from rollout_backend.preflight import open_runtime
from rollout_backend.relay.process import DialerProcess, behind_relay
from rollout_backend.report import GroupResult, StepResult
from rollout_backend.serving.fleet import Fleet, ServerState, ServingEvent
from rollout_backend.step import Step
from rollout_backend.step_services import StepServices
from rollout_backend.tasks import Task, unique

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for a display. `outcomes` counts by class; `phases` what is not settled yet."""

    phases: dict[str, int]
    outcomes: dict[str, int]
    open_sessions: int
    rewards: tuple[float, ...]
    gateway: GatewayStats | None


class RolloutManager:
    """Enter it once. `collect` may be called from several tasks at once, for different steps."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        on_status: Callable[[str], None] = lambda text: None,
        on_serving: Callable[[ServingEvent], None] = lambda event: None,
    ) -> None:
        """`on_status` is told what is being started; `on_serving` what happens to engines, router and
        gateways."""
        self.config = config
        self.archive = RunArchive(config.run_dir)
        self._on_status = on_status
        self._on_serving = on_serving
        self._stack = AsyncExitStack()
        self._steps: dict[int, Step] = {}
        self._numbers = itertools.count()
        self._services: StepServices | None = None
        self._gateway: GatewayFleet | None = None
        self._dialer: DialerProcess | None = None
        self._fleet: Fleet | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._collecting: set[asyncio.Task[StepResult]] = set()

    # --- start and end ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Raises ConfigError, PreflightError or StartupError; whatever was started by then is ended."""
        async with AsyncExitStack() as stack:
            self._services = await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_status("stopping what was started")
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> StepServices:
        config, logs = self.config, self.archive.logs
        self._on_status("checking bucket, runtime and queue")
        store = await ResultStore.open(config.storage, config.aws, connections=config.collect.fetches + 4)
        stack.push_async_callback(store.aclose)
        await store.check()
        runtime = await open_runtime(config, self._on_status)
        stack.push_async_callback(runtime.aclose)
        await runtime.check()
        secret = run_secret(config)
        janitor = await Janitor.start(config, store, runtime, logs / "janitor.log")
        stack.push_async_callback(janitor.aclose)
        runtime = janitor.watch(runtime)
        queue = None
        if config.uses_queue:
            queue = await AnnouncementQueue.open(config.queue, config.aws, config.run_id)
            stack.push_async_callback(queue.aclose)
            janitor.queue_made(queue)
        retokeniser = None
        if config.collect.retokenise:
            retokeniser = await Retokeniser.open(config.model)
            stack.callback(retokeniser.close)

        self._on_status(f"starting {config.serving.servers} SGLang and the router")
        fleet = Fleet(config, logs, self._on_serving)
        stack.push_async_callback(fleet.stop)
        await fleet.start()
        self._fleet = fleet
        self._on_status("starting the gateway")
        gateway = GatewayFleet(
            behind_relay(config),
            fleet.router_url,
            logs,
            key_secret(secret, config.run_id),
            seal_secret=secret,
            journals=config.run_dir / "gateway",
            on_event=self._on_serving,
        )
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        self._gateway = gateway
        if config.relay is not None:
            self._on_status(f"dialling out to the relay at {config.relay.url}")
            self._dialer = DialerProcess(config.relay, gateway.urls, logs / "relay.log")
            stack.push_async_callback(self._dialer.stop)
            await self._dialer.start()

        sealer = Sealer(secret) if config.gateway.require_seal else None
        buffer = RolloutBuffer(
            config.run_id,
            store,
            queue,
            config.collect.fetches,
            retokeniser,
            verify=sealer.check if sealer is not None else None,
        )
        self._watching = [
            asyncio.create_task(buffer.run(config.queue.receivers)),
            asyncio.create_task(fleet.failed()),
            asyncio.create_task(_gateway_ends(gateway)),
            *([asyncio.create_task(_gateway_ends(self._dialer))] if self._dialer is not None else []),
        ]
        stack.push_async_callback(self._end_watching)
        stack.push_async_callback(self._end_steps)  # first of all: they need the rest to close their sessions

        async def adopt(session_ids: Collection[str]) -> None:
            for session_id in session_ids:
                janitor.session_adopted(session_id)
            await gateway.adopt(session_ids)

        runtime_config = config.runtime
        manifests = ManifestStore(store, config.run_id)
        presigner = Presigner(config.storage, config.aws) if config.storage.presigned else None
        return StepServices(
            config=config,
            dispatcher=Dispatcher(
                runtime,
                per_s=runtime_config.invoke_per_s,
                max_sessions=runtime_config.max_sessions,
                max_attempts=runtime_config.max_attempts,
            ),
            closer=SessionCloser(runtime, runtime_config.stop_per_s),
            buffer=buffer,
            queue_url=queue.url if queue is not None and presigner is None else None,
            endpoint=gateway.endpoint,
            revoke=gateway.revoke,
            keep=self.archive.keep,
            read_manifest=manifests.read,
            write_manifest=manifests.write,
            sealed_by=sealer.fingerprint if sealer is not None else "",
            gateway=gateway.identity,
            dispatched=Dispatched(config.run_dir / "steps"),
            adopt=adopt,
            presign=presigner.urls if presigner is not None else None,
            breaker=Breaker(config.breakers, lambda entry: log_place(config, entry)),
            set_aside=SetAside(store, config.run_id, config.group.set_aside_after)
            if config.group.set_aside_after is not None
            else None,
        )

    async def _end_steps(self) -> None:
        for step in self._collecting:
            step.cancel()
        await asyncio.gather(*self._collecting, return_exceptions=True)

    async def _end_watching(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    # --- the work -----------------------------------------------------------------------------------------

    async def collect(
        self,
        tasks: Iterable[Task],
        *,
        step: int | None = None,
        sampling: Sampling | None = None,
        on_group: Callable[[GroupResult], None] = lambda group: None,
        weights: str = "",
        same_weights: bool = True,
    ) -> StepResult:
        """Rolls the tasks out and returns once the group policy is satisfied or the step's time is up.

        `step` names the step's place in S3; by default steps are numbered from 0. `sampling` replaces the
        settings' own for this step. `on_group` is told of each group as soon as all of it is settled.

        A step of this run that was begun before, with the same number and tasks of the same content, goes on where
        it was left: finished rollouts are taken, agents that are still at work are waited for where the gateway has
        what they sampled, other sessions are closed, and only the rest is run. Say
        `same_weights=False` where other weights are served now; then all of it is run anew. `weights` names their
        version: of another one, or of another model, nothing is taken.

        Raises:
            TaskFileError: no task, or two with one id.
            ManifestError: the step was begun before, and its manifest cannot be read.
            StoreError: S3 did not take the step's manifest; nothing was dispatched.
            ServingError: no engine or no gateway is left; the step's open rollouts ended as infra_error.
            CredentialsExpired: AWS takes this process's credentials no more.
            CircuitOpen: rollouts are lost in one way again and again; every step of the run ends so.
            LedgerError: the books do not balance.
        """
        assert self._services is not None, "enter the manager first: async with RolloutManager(config) as manager"
        wanted = unique(tasks)
        number = next(self._numbers) if step is None else step
        served = f"{self.config.model.path}@{weights}"
        current = Step(number, wanted, self._services, sampling, on_group, weights=served, same_weights=same_weights)
        self._steps[number] = current
        running = asyncio.create_task(current.run())
        self._collecting.add(running)
        running.add_done_callback(self._collecting.discard)
        try:
            await asyncio.wait([running, *self._watching], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                current.abort(_why_it_ended(self._watching))
            result = await running
        except CircuitOpen as error:
            for other in self._steps.values():
                other.abort(error)
            raise
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise
        finally:
            del self._steps[number]
        self.archive.keep_report(result.report)
        return result

    async def follow_engines(self, urls: Sequence[str]) -> None:
        """Serves with these engines from now on; for `serving.kind=external`. Raises StartupError."""
        assert self._fleet is not None, "enter the manager first"
        await self._fleet.follow(urls)

    def servers(self) -> tuple[ServerState, ...]:
        """The router and the engines, as they stand."""
        return self._fleet.snapshot() if self._fleet is not None else ()

    async def progress(self) -> Progress:
        phases: dict[str, int] = dict.fromkeys(Phase, 0)
        outcomes: dict[str, int] = {}
        open_sessions, rewards = 0, []
        for current in self._steps.values():
            for phase, count in current.ledger.phases().items():
                phases[phase] += count
            for outcome, count in current.ledger.counts().items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
            open_sessions += len(current.ledger.open_sessions)
            rewards += current.rewards()
        try:
            gateway = await self._gateway.stats() if self._gateway is not None else None
        except ServingError:  # it is being started again, or the run ends
            gateway = None
        return Progress(phases, outcomes, open_sessions, tuple(rewards), gateway)

    @staticmethod
    def blocking(config: RolloutConfig) -> BlockingRolloutManager:
        return BlockingRolloutManager(config)


class BlockingRolloutManager:
    """A RolloutManager on an event loop in a thread of its own."""

    def __init__(
        self, config: RolloutConfig, on_serving: Callable[[ServingEvent], None] = lambda event: None
    ) -> None:
        """`on_serving` is told, in that thread, what happens to engines, router and gateways."""
        self._manager = RolloutManager(config, on_serving=on_serving)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-manager", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._manager.__aenter__(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the steps that still run, and everything that was started.

        Raises:
            TimeoutError: it was not done in time; what is left ends with this process.
        """
        self.submit(self._manager.__aexit__(None, None, None)).result(timeout_s)
        self._end_loop()

    @property
    def manager(self) -> RolloutManager:
        """The manager itself, whose coroutines `submit` runs."""
        return self._manager

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Runs a coroutine of the manager beside whatever else it does."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def collect(
        self, tasks: Iterable[Task], *, step: int | None = None, sampling: Sampling | None = None
    ) -> StepResult:
        """As `RolloutManager.collect`. Interrupted, it closes the step's sessions before it raises."""
        return self.wait_for(self._manager.collect(tasks, step=step, sampling=sampling))

    def wait_for(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine of the manager returns. Interrupted, it is cancelled before the interrupt goes on."""
        future = self.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _gateway_ends(gateway: GatewayFleet | DialerProcess) -> None:
    raise ServingError(await gateway.wait())


def _why_it_ended(watching: Iterable[asyncio.Task[None]]) -> BaseException:
    for task in watching:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):  # the first of them has ended the others
                error = error.exceptions[0]
            return error
    return ServingError("a part of the run ended without a word: see the logs")
