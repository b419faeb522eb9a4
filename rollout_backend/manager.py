"""Start the services of a run, collect its steps, and stop everything that was started.

    async with RolloutManager(config) as manager:
        step = await manager.collect(tasks)

    with RolloutManager.blocking(config) as manager:  # for code without an event loop
        step = manager.collect(tasks)

Invariants:

- However the run ends, it leaves no server, session or queue behind. If the process is killed, the janitor removes
  the sessions and the queue.
- One manager holds a run at a time: see `run_lease`.

A run stops early if the circuit breaker opens, the lease is lost, no engine or gateway is left, the credentials
expire, the local cloud ends, or a ledger does not balance. `RolloutManager.collect` lists the exceptions.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from agent_wrapper.contract import MAX_STEP, Sampling
from rollout_backend.base.garbage_collection import rare_full_collections
from rollout_backend.base.local_keys import bypass_proxies
from rollout_backend.base.logs import log_fields, report_failure
from rollout_backend.base.retry import log_retry, repeat, retry_until
from rollout_backend.base.tracing import SpanSender
from rollout_backend.config import RolloutConfig
from rollout_backend.core.earlier_batches import describe_batch
from rollout_backend.core.harbor import describe_ignored, fit_to_runtime
from rollout_backend.core.ledger import Phase
from rollout_backend.core.lineage import Lineage
from rollout_backend.core.manifest import Manifest, StepRequest
from rollout_backend.core.tasks import Task, check_private, check_unique, planned_rollouts
from rollout_backend.errors import CircuitOpen, ConfigError, RolloutBackendError, RunHeld, ServingError, StoreError
from rollout_backend.model.serving.adapters import AdapterUpdate
from rollout_backend.model.serving.engine import reported_version
from rollout_backend.model.serving.engine_fleet import ServerState
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.model.serving.supervisor import ServingEvent, cancel_all
from rollout_backend.model.serving.weights import WeightUpdate
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.progress import FirstCall, Progress
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.rollout_spans import rollout_spans
from rollout_backend.run.accounts.run_info import RUNS_S, TRAINERS, RunStart, RunState, StartedBy
from rollout_backend.run.accounts.step_report import GroupResult, StepResult
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.dispatch.ramp import check_ramp
from rollout_backend.run.services import RunServices
from rollout_backend.run.step.step import Step

# Only a run with metrics loads prometheus_client.
if TYPE_CHECKING:
    import torch

    from rollout_backend.model.gateway.stats import GatewayStats
    from rollout_backend.run.accounts.metrics import RunMetrics

log = logging.getLogger(__name__)

# Gateways must answer within this time. Prometheus gives up after 10 s.
_METRICS_S = 5.0

_T = TypeVar("_T")
_P = ParamSpec("_P")


class RolloutManager:
    """A run and its services. Enter it once.

    Several asyncio tasks can call `collect` at the same time, for different steps.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        on_status: Callable[[str], None] = lambda text: None,
        on_phase: Callable[[RunPhase], None] = lambda phase: None,
        on_serving: Callable[[ServingEvent], None] = lambda event: None,
        wait_lost: Callable[[], Awaitable[None]] | None = None,
        rollouts: int | None = None,
        started_by: StartedBy = "python",
        agent: Mapping[str, str] | None = None,
        gateway_poll_s: float = 5.0,
    ) -> None:
        """Create a manager. Nothing starts before you enter it.

        `on_phase` is called when the run enters a phase, `on_status` with a line for each other change while it
        starts, and `on_serving` with each event of an engine, the router or a gateway. `rollouts` is the number of
        rollouts in a step: a step that cannot finish in time is then refused before anything starts. `wait_lost`
        raises CloudLost when the run's local cloud ends.
        `started_by` and `agent` are recorded in the run's folder; by default `agent` is what the runtime describes.
        The gateways' counts are read every `gateway_poll_s`; after six intervals in which agents run and none calls
        the model, a warning is logged.
        """
        self.config = config
        self.archive = RunArchive(config.run_dir, copies_gb=config.storage.local_copies_gb)
        self._on_status = on_status
        self._on_phase = on_phase
        self._on_serving = on_serving
        self._metrics: RunMetrics | None = None
        if config.observe.metrics_port is not None:
            from rollout_backend.run.accounts.metrics import RunMetrics

            self._metrics = RunMetrics(config)
        self._traces: SpanSender | None = None
        self._rollouts = rollouts
        self._wait_lost = wait_lost
        self._started_by = started_by
        self._agent = agent
        self._gateway_poll_s = gateway_poll_s
        self._stack = AsyncExitStack()
        self._run: RunServices | None = None
        self._steps: dict[int, Step] = {}
        # True after the log has named what the runtime does not provide.
        self._said_ignored = False
        self._next_step = 0
        self._collecting: set[asyncio.Task[StepResult]] = set()
        self._first_call: FirstCall | None = None
        # The gateways' counts at the previous report.
        self._reported: GatewayStats | None = None

    # --- start and end ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the run's services.

        Raises:
            ConfigError, PreflightError, StartupError, RunHeld: after everything that was started has been stopped.
        """
        # The user's proxy cannot reach services on this machine.
        bypass_proxies()
        run = RunServices(
            self.config,
            self.archive,
            on_status=self._on_status,
            on_phase=self._on_phase,
            on_serving=self._report_serving,
            wait_lost=self._wait_lost,
        )
        async with AsyncExitStack() as stack:
            try:
                with log_fields(run=self.config.run_id):
                    await run.start(stack, self._rollouts)
            except RunHeld:
                # The folder belongs to another manager.
                raise
            except RolloutBackendError as error:
                why = str(error)
                await self._write_start(
                    lambda start: self.archive.write_failed_start(self.config, start, why), self._agent or {}
                )
                raise
            stack.push_async_callback(asyncio.to_thread, self.archive.close)
            self.config = self.config.priced_for(run.agent.get("platform"))
            agent, engine = run.agent if self._agent is None else self._agent, await self._engine_version()
            await self._write_start(lambda start: self.archive.write_start(self.config, start), agent, engine)
            setting = "relay.url" if self.config.relay is not None else "gateway.public_url"
            self._first_call = FirstCall(run.serving.gateways.public_urls[0], setting, 6 * self._gateway_poll_s)
            for work, what in (
                (functools.partial(self._watch_gateways, self._first_call), "watching the gateways"),
                (functools.partial(self._write_running_steps, run), "writing the records of running steps"),
            ):
                task = asyncio.create_task(repeat(work, what))
                task.add_done_callback(report_failure(what))
                stack.callback(task.cancel)
            self._run = run
            if self.config.observe.otlp_endpoint is not None:
                self._traces = SpanSender(self.config.observe.otlp_endpoint, "rollout-manager")
                stack.push_async_callback(asyncio.to_thread, self._traces.close)
            await self._serve_metrics(stack)
            # Pushed last, so it runs first: steps need the services.
            stack.push_async_callback(cancel_all, self._collecting)
            self._stack = stack.pop_all()
        self._on_phase(RunPhase.ROLLOUTS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_phase(RunPhase.STOP)
        await self._stack.aclose()
        # After a takeover, `run.json` belongs to another manager.
        if self._run is None or self._run.lease.lost is None:
            interrupted = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            state: RunState = "ended" if error is None else "interrupted" if interrupted else "failed"
            await self.archive.wait(self.archive.submit(self.archive.write_end, state, str(error or "")))

    async def _engine_version(self) -> str | None:
        serving = self.config.serving
        # verl's servers may sleep, and run in verl's environment.
        ask = serving.kind == "external" and self._started_by != "verl"
        return await reported_version(serving.urls[0].rstrip("/"), serving.engine) if ask else None

    async def _write_start(
        self, write: Callable[[RunStart], None], agent: Mapping[str, str], engine: str | None = None
    ) -> None:
        def work() -> None:
            write(RunStart.of(self.config, self._started_by, agent, engine))

        await self.archive.wait(self.archive.submit(work))

    async def _serve_metrics(self, stack: AsyncExitStack) -> None:
        if self._metrics is None:
            return
        from rollout_backend.run.accounts.metrics import serve_metrics

        serving = serve_metrics(self.config.observe, self._metrics, self._update_metrics)
        self._on_status(f"metrics: {await stack.enter_async_context(serving)}")

    async def _update_metrics(self) -> None:
        assert self._metrics is not None
        try:
            async with asyncio.timeout(_METRICS_S):
                gateway = await self._gateway_stats()
        except TimeoutError:
            gateway = None
        steps, services = [*self._steps.values()], self._started.for_steps
        self._metrics.update(steps, services.dispatcher, services.buffer, self.servers(), gateway)

    def _report_serving(self, event: ServingEvent) -> None:
        if self._metrics is not None:
            self._metrics.record_event(event)
        if event.kind == "restarted":
            for step in self._steps.values():
                step.results.restarts[event.server] += 1
        self._on_serving(event)

    async def _report_step(self, step: Step, records: Sequence[RolloutRecord]) -> None:
        try:
            if self._metrics is not None:
                self._metrics.end_step(step, records)
            if self._traces is not None:
                results = {rollout.rollout_id: rollout for rollout in step.results.received}
                spans = (
                    span
                    for each in records
                    for span in rollout_spans(
                        self.config.run_id,
                        each,
                        results.get(each.rollout_id),
                        step.results.deliveries.get(each.rollout_id),
                    )
                )
                # This takes 0.6 s for 4,000 rollouts.
                await asyncio.to_thread(self._traces.send, spans)
        except Exception:
            # A monitor never ends a step.
            log.warning("metrics or traces of step %s are incomplete", step.name, exc_info=True)

    async def _watch_gateways(self, first_call: FirstCall) -> None:
        """Sample the engines' load for the current steps. Log a warning if agents run for long and none of them has
        called the model."""
        while True:
            await asyncio.sleep(self._gateway_poll_s)
            stats = await self._gateway_stats() if self._steps else None
            if stats is None:
                continue
            for step in self._steps.values():
                step.results.engine_use.add(stats.engines)
            running = sum(step.ledger.phases()[Phase.RUNNING] for step in self._steps.values())
            was_silent = bool(first_call.warning)
            first_call.observe(asyncio.get_running_loop().time(), running, stats)
            if first_call.warning and not was_silent:
                log.warning("%s", first_call.warning)

    async def _write_running_steps(self, run: RunServices) -> None:
        """Every few seconds, write the records of the current steps and renew `run.json`, for `rollout report` and
        `rollout ls`."""
        loop, took_s = asyncio.get_running_loop(), 0.0
        while True:
            # At most 1 % of this thread's time, and often enough for readers on other machines.
            await asyncio.sleep(min(max(self._gateway_poll_s, 100 * took_s), RUNS_S / 3))
            took_s = 0.0
            # After a takeover, these files belong to another manager.
            if run.lease.lost is None:
                self.archive.renew_info()
            for number, step in [*self._steps.items()]:
                if self._steps.get(number) is step and run.lease.lost is None:
                    began = loop.time()
                    lines = step.running_records()
                    took_s += loop.time() - began
                    if lines:
                        await self.archive.wait(self.archive.write_running(number, lines))

    @property
    def _started(self) -> RunServices:
        if self._run is None:
            raise RuntimeError("enter the manager first: async with RolloutManager(config) as manager")
        return self._run

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
        allow_subset: bool = False,
        adapter: str = "",
    ) -> StepResult:
        """Run the tasks' rollouts, and return once the group policy is satisfied or the step's deadline has passed.

        `step` is the step's number in S3; by default the next one after the largest of this manager, from 0.
        `sampling` overrides the configured sampling for this step. `on_group` is called with each group as soon as
        all its rollouts are settled.

        If a step with the same number and the same tasks was started before in this run, it resumes: finished
        rollouts are reused, running agents are awaited if the gateway has what they sampled, other sessions are
        closed, and only the remaining rollouts run. Pass `same_weights=False` if other weights are served now; then
        all rollouts run again. `weights` names the version of the weights, by default `weight_version`: results of
        another version or another model are not reused. Two sets of weights need two names: a trainer that names them
        by its step passes `same_weights=False` for each step after its first one, because it trains their weights
        again. With `allow_subset`, the tasks may be some of those that the step had before.

        `adapter` names the LoRA adapter with which all model calls of the step sample: one that `load_adapter` has
        loaded, or for `serving.kind=external` one that you have loaded there. By default they sample from the model
        without an adapter. Another version of the adapter counts as other weights.

        Raises:
            TaskFileError: no task, or two with one id.
            ConfigError: the rollouts cannot finish within `timeouts.collection_s`, or a task has a private part and
                no scorer is configured, or no such adapter is loaded, or the step is being collected already, or its
                number is impossible; nothing was dispatched.
            ManifestError: the step was started before, and its manifest cannot be read.
            StoreError: S3 refused the step's manifest until the step's deadline; nothing was dispatched.
            ServingError: no engine or no gateway is left; the step's open rollouts ended as infra_error.
            CredentialsExpired: AWS no longer accepts this process's credentials.
            CircuitOpen: too many rollouts failed for the same reason; every step of the run raises this.
            RunHeld: another manager has taken the run over; every step of this manager raises this.
            CloudLost: the local cloud has ended.
            LedgerError: the ledger does not reconcile.
        """
        with rare_full_collections(), log_fields(run=self.config.run_id):
            served, wanted = self._started.serving, self._check_tasks(tasks)
            named = served.named_adapter(adapter)
            number = self._next_step if step is None else step
            if not 0 <= number <= MAX_STEP:
                raise ConfigError(f"step {number} is not from 0 to {MAX_STEP}")
            self._next_step = max(self._next_step, number + 1)
            request = StepRequest(
                number,
                wanted,
                sampling or self.config.sampling,
                weights=f"{self.config.model.path}@{weights or served.weights_name}",
                same_weights=same_weights,
                allow_subset=allow_subset,
                adapter=adapter,
                weights_are_counted=not weights,
                trainer_name=self._trainer_name(number),
            )
            if named is not None:
                request = replace(request, weights=f"{request.weights}+{named.engine_name}")
            collecting = asyncio.create_task(self._collect(request, on_group))
            self._collecting.add(collecting)
            collecting.add_done_callback(self._collecting.discard)
            return await collecting

    def _trainer_name(self, step: int) -> str:
        """Return a step's number as the trainer counts it; empty without a trainer."""
        return describe_batch(step)[0] if self._started_by in TRAINERS else ""

    def _check_tasks(self, tasks: Iterable[Task]) -> tuple[Task, ...]:
        """Return the tasks, adapted to this run's runtime. Raises TaskFileError or ConfigError."""
        wanted = check_unique(tasks)
        check_private(wanted, self.config.scoring.enabled)
        wanted = fit_to_runtime(wanted, self.config.runtime)
        if not self._said_ignored and (ignored := describe_ignored(wanted, self.config.runtime)):
            self._said_ignored = True
            log.warning("%s", ignored)
        ramp, _ = check_ramp(self.config, self._started.limits, planned_rollouts(wanted, self.config.group))
        log.info("%s", ramp)
        return wanted

    async def _collect(self, request: StepRequest, on_group: Callable[[GroupResult], None]) -> StepResult:
        run, number = self._started, request.step
        if number in self._steps:
            raise ConfigError(f"step {request.name} is being collected: wait for it, or give this call another step")
        # This raises if the adapter was unloaded since the request was made.
        run.serving.named_adapter(request.adapter)
        current = Step(request, run.for_steps, on_group)
        self._steps[number] = current
        self.archive.write_tasks(number, request.tasks)
        running = asyncio.create_task(current.run())
        result: StepResult | None = None
        try:
            await asyncio.wait([running, *run.background], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                current.early_end.abort(run.failure())
            result = await running
            if not await run.lease.try_to_confirm():
                log.warning("S3 does not answer: another manager may have taken the run over")
        except RunHeld as error:
            run.lease.mark_lost(error)
            raise
        except CircuitOpen as error:
            for other in self._steps.values():
                other.early_end.abort(error)
            raise
        except asyncio.CancelledError:
            await cancel_all([running])
            raise
        finally:
            del self._steps[number]
            records = current.results.records.all() if result is None else result.records
            # After a takeover, the step belongs to another manager.
            if run.lease.lost is None:
                # Encoding thousands of records would block the event loop.
                await self.archive.wait(self.archive.submit(self.archive.write_records, number, records))
            await self._report_step(current, records)
        report = result.report.model_copy(update=await self._gateway_growth())
        await self.archive.wait(self.archive.submit(self.archive.write_report, report))
        current.release()
        return replace(result, report=report)

    async def _gateway_growth(self) -> dict[str, Any]:
        """Return the gateways' counts since the previous report, by the report's fields; empty if a gateway does not
        answer."""
        stats = await self._gateway_stats()
        if stats is None:
            return {}
        before, self._reported = self._reported, stats
        if before is not None and not stats.engine_given_up:
            # A gateway that has restarted has not asked the engines yet, so the earlier counts still hold.
            stats.engine_given_up = before.engine_given_up

        def growth(name: str) -> dict[str, int]:
            return dict(Counter(getattr(stats, name)) - Counter(getattr(before, name, ())))

        return {
            "malformed_tool_calls": growth("malformed"),
            "unknown_tool_calls": growth("unknown_tools"),
            "undelivered_replies": stats.undelivered - getattr(before, "undelivered", 0),
            "given_up_calls": growth("engine_given_up"),
            "left_out_replies": stats.left_out - getattr(before, "left_out", 0),
            "unjournaled_sessions": stats.unjournaled - getattr(before, "unjournaled", 0),
            "dropped_log_lines": stats.dropped_log_lines - getattr(before, "dropped_log_lines", 0),
            "runaways": {name: stats.runaways[name] for name in growth("runaways")},
            "heard_after_stop": growth("after_stop"),
        }

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engines serve. It counts the updates of this run, including those by
        earlier trainers.

        0 names the weights of `model.path`.
        """
        return self._started.serving.weight_version

    async def update_weights(self, weights: Path | str | Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Serve new weights: a folder with safetensors, or the tensors themselves, such as `model.state_dict()`. With
        `serving.kind=tinker`, the path of weights that the service has saved for sampling.

        Names and shapes must be those of `model.path`. Tensors are written to `serving.weights_dir`, where the newest
        ones are kept; with `serving.weight_transfer` `gloo` they are sent over the network, and a copy stays in this
        process. Keep a folder for as long as its weights are the newest: engines load them again when they restart,
        also under a later trainer of this run.

        The engines keep sampling while the weights are checked and written or copied. Then generation is paused until
        each engine has loaded them. Model calls in flight resume from their tokens, and each token carries the
        version that sampled it. An engine that does not load the weights is restarted, and loads them before it
        serves again.

        Raises:
            WeightsMismatch: names or shapes are not the model's, or tensors have NaN or infinite values. The engines
                were not paused.
            ConfigError: `serving.kind` takes no such weights, or a folder is no model folder with safetensors.
            WeightUpdateFailed: no engine loaded the weights. All restart with the previous weights.
            ServingError: the weights could not be written.
        """
        with log_fields(run=self.config.run_id):
            return await self._started.serving.update_weights(weights)

    @property
    def adapters(self) -> Mapping[str, int]:
        """Version of each loaded LoRA adapter, including those that earlier trainers of this run loaded."""
        return self._started.serving.adapters

    async def load_adapter(self, name: str, folder: Path) -> AdapterUpdate:
        """Load a LoRA adapter, or its next version, from a folder that PEFT's `save_pretrained` wrote.

        Save each version to a separate folder, and keep it for as long as it is the newest: engines load it again
        when they restart, also under a later trainer of this run.

        The engines sample while they load it. Then model calls in flight are aborted, and resume from their tokens:
        those with this adapter sample with the new version. Each token carries the adapter and the version that
        sampled it, such as `math@3`. An engine that does not load the adapter is restarted, and loads it before it
        serves again.

        Raises:
            ConfigError: `serving.lora_rank` is not set, or the folder, its rank, its modules or the name do not fit
                the settings. No engine was called.
            WeightsMismatch: the adapter belongs to another model. No engine was called.
            ServingError: no engine loaded the adapter, and nothing changed; or a gateway does not answer.
        """
        with log_fields(run=self.config.run_id):
            return await self._started.serving.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter from the engines. Its version numbers are not reused.

        Raises:
            ConfigError: no such adapter is loaded, or a step samples with it.
            ServingError: a gateway does not answer.
        """

        def check_unused() -> None:
            users = [step.name for step in self._steps.values() if step.adapter == name]
            if users:
                raise ConfigError(f"step {users[0]} samples with the adapter {name}: unload it after the step")

        with log_fields(run=self.config.run_id):
            await self._started.serving.unload_adapter(name, check_unused)

    async def manifests_from(self, step: int) -> list[Manifest]:
        """Return the manifests in S3 of this step and of all steps with larger numbers.

        Raises:
            ManifestError: a manifest cannot be read.
            StoreError: S3 did not answer within `timeouts.collection_s`.
        """
        return await self._ask_store(lambda manifests: manifests.read_from(step), step)

    async def begin_at(self, step: int) -> Lineage:
        """Record that this run's trainer begins at a step, for one that collects earlier steps first. Return the
        run's trainers up to this one. Raises as `manifests_from` does."""
        return await self._ask_store(lambda manifests: manifests.begin(step, ""), step)

    async def _ask_store(self, call: Callable[[ManifestStore], Awaitable[_T]], step: int) -> _T:
        services = self._started.for_steps
        until = asyncio.get_running_loop().time() + self.config.timeouts.collection_s
        warn = log_retry(log, "the manifests from step %s cannot be read", self._trainer_name(step) or step)
        ask = functools.partial(call, services.manifests)
        return await retry_until(until, ask, StoreError, services.pauses.store, before_sleep=warn)

    async def follow_engines(self, urls: Sequence[str]) -> None:
        """Replace the list of engines, for `serving.kind=external` without `serving.follow_dns`."""
        if self.config.serving.follow_dns:
            raise ConfigError("serving.follow_dns follows the engines already: remove it to call follow_engines")
        await self._started.serving.engines.follow(urls)

    async def pause_engines(self) -> None:
        """Hold all model calls, for a trainer that takes the engines' memory: for `serving.kind=external`.

        Returns once no call is at an engine and every engine is idle. Calls are held in the gateway until
        `resume_engines`, for `timeouts.model_call_s` at most, and then answered 503 with Retry-After.

        Raises:
            ServingError: a gateway does not answer. The engines are paused nevertheless.
        """
        await self._started.serving.pause()

    async def resume_engines(self) -> None:
        """Let model calls reach the engines again after `pause_engines`.

        Raises:
            ServingError: a gateway does not answer.
        """
        await self._started.serving.resume()

    def servers(self) -> tuple[ServerState, ...]:
        """Return the state of the router and of each engine."""
        return self._run.serving.engines.snapshot() if self._run is not None else ()

    async def progress(self) -> Progress:
        """Return counts of the rollouts of all current steps."""
        gateway = await self._gateway_stats() if self._run is not None else None
        warning = self._first_call.warning if self._first_call is not None else ""
        steps = [(current.ledger, current.totals) for current in self._steps.values()]
        loop_now = asyncio.get_running_loop().time()
        return Progress.of(steps, gateway, warning, servers=self.servers(), loop_now=loop_now)

    async def _gateway_stats(self) -> GatewayStats | None:
        """Return the gateways' counts; None if one does not answer, because it is restarted or the run ends."""
        try:
            return await self._started.serving.gateways.stats()
        except ServingError:
            return None

    @staticmethod
    def blocking(config: RolloutConfig) -> BlockingRolloutManager:
        """Return a manager for code without an event loop, with the same `collect`."""
        return BlockingRolloutManager(config)


def _blocking(
    method: Callable[Concatenate[RolloutManager, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[BlockingRolloutManager, _P], _T]:
    """Return a method that runs this one in the manager's event loop, and waits for its result."""

    @functools.wraps(method)
    def call(self: BlockingRolloutManager, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.wait_for(method(self.manager, *args, **kwargs))

    return call


class BlockingRolloutManager:
    """A RolloutManager whose event loop runs in a separate thread.

    `collect`, `update_weights`, `load_adapter` and `unload_adapter` are those of RolloutManager, and wait for their
    results. An interrupt cancels the step, whose sessions are closed before the `with` block is left.
    """

    def __init__(
        self,
        config: RolloutConfig,
        on_serving: Callable[[ServingEvent], None] = lambda event: None,
        started_by: StartedBy = "python",
    ) -> None:
        """Create a manager. Nothing starts before you enter it.

        `on_serving` is called in the manager's thread with each event of an engine, the router or a gateway.
        """
        self.manager = RolloutManager(config, on_serving=on_serving, started_by=started_by)
        """The manager itself, whose coroutines `submit` runs."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-manager", daemon=True)
        self._thread.start()
        starting: list[asyncio.Task[RolloutManager]] = []

        async def start() -> None:
            starting.append(asyncio.create_task(self.manager.__aenter__()))
            await starting[0]

        try:
            self.submit(start()).result()
        except BaseException:
            self.submit(cancel_all(starting)).result()
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error=error)

    def close(self, timeout_s: float | None = None, error: BaseException | None = None) -> None:
        """End the steps in progress, and everything that was started. `error` is the reason, for the run's folder.

        Raises:
            TimeoutError: not everything ended within `timeout_s`; the rest ends with this process.
        """
        self.submit(self.manager.__aexit__(None, error, None)).result(timeout_s)
        self._end_loop()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine of the manager concurrently with its other work.

        Raises:
            RuntimeError: the manager was not entered, or is closed.
        """
        if self._loop is None:
            work.close()
            raise RuntimeError("enter the manager first: with RolloutManager.blocking(config) as manager")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    collect = _blocking(RolloutManager.collect)
    update_weights = _blocking(RolloutManager.update_weights)
    load_adapter = _blocking(RolloutManager.load_adapter)
    unload_adapter = _blocking(RolloutManager.unload_adapter)

    @property
    def weight_version(self) -> int:
        """The version of the weights that the engines serve."""
        return self.manager.weight_version

    def wait_for(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a manager's coroutine. An interrupt cancels the coroutine before it propagates."""
        future = self.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None
