"""The Prometheus metrics of one run, and the endpoint that serves them.

Invariants:

- Metrics are read from the run's accounts at each scrape and at the end of each step. No other code reports to them,
  so they cost nothing while disabled.
- Counters never decrease. When a gateway restarts, its earlier counts are kept, except for calls since the last
  scrape.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from agent_wrapper.contract import Outcome
from rollout_backend.base.addresses import host_port, listen_addresses
from rollout_backend.config import ObserveConfig, RolloutConfig
from rollout_backend.core.ledger import CallTally, Ledger, Phase
from rollout_backend.core.reasons import WHAT_TO_DO
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.engine_fleet import ServerState
from rollout_backend.model.serving.server_process import require_port
from rollout_backend.model.serving.supervisor import ServingEvent
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.summary import add, duration, seconds_of, span
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.dispatch.dispatcher import Dispatcher

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MINUTES = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_GIVEN_UP = ("prompt", "sampled", "limit")
# Replaces reasons that agents chose.
_OTHER = "other"
_SHUTDOWN_S = 1.0


class _Seen:
    """The last values of counters."""

    def __init__(self) -> None:
        self._values: dict[Any, float] = {}

    def growth(self, key: object, value: float) -> float:
        """Return the growth of a count since the last call; 0 if it was reset."""
        before, self._values[key] = self._values.get(key, 0), value
        return max(0, value - before)


class MeteredStep(Protocol):
    @property
    def ledger(self) -> Ledger: ...

    @property
    def latencies(self) -> Sequence[float]:
        """Return the seconds from announcement to arrival, for each result that was announced."""


class RunMetrics:
    """The metrics of one run. `registry` holds them."""

    def __init__(self, config: RolloutConfig) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        run = gauge("rollout_run_info", "1; the labels name the run.", ("run_id", "model"))
        run.labels(config.run_id, config.model.served_name).set(1)
        self._rollouts = counter("rollout_rollouts_total", "Settled rollouts.", ("outcome", "reason"))
        self._open_rollouts = gauge("rollout_open_rollouts", "Rollouts that are not settled.", ("phase",))
        self._open_sessions = gauge("rollout_open_sessions", "Sessions that may be open.")
        self._duration = histogram(
            "rollout_duration_seconds", "From a rollout's last invoke until its result settled it.", buckets=_MINUTES
        )
        self._delivery = histogram(
            "rollout_delivery_seconds",
            "From a result's announcement, which follows its PUT at once, until the result was validated.",
            buckets=_SECONDS,
        )
        self._extra_results = counter(
            "rollout_extra_results_total", "Results and announcements that settled no rollout.", ("kind",)
        )
        self._step_duration = histogram(
            "rollout_step_duration_seconds",
            "From a step's first plan until its last rollout was settled.",
            buckets=_MINUTES,
        )
        self._phase_seconds = counter(
            "rollout_phase_seconds_total", "Seconds of rollouts by phase; added when their step ends.", ("phase",)
        )
        self._runtime_calls = counter(
            "rollout_runtime_calls_total", "Calls to the agents' runtime that it answered.", ("call", "answer")
        )
        self._invoke_rate = gauge("rollout_invoke_rate_per_second", "Invokes that are admitted per second at most.")
        self._queue_up = gauge("rollout_queue_up", "1 if the queue answers; 0 if results are found by listing.")
        self._bad_messages = counter(
            "rollout_queue_bad_messages_total", "Messages of the queue that led to no result.", ("kind",)
        )
        self._servers_up = gauge("rollout_servers_up", "Servers that serve.", ("server",))
        self._server_events = counter(
            "rollout_server_events_total", "Starts, losses and restarts of servers.", ("server", "event")
        )
        self._gateway_up = gauge("rollout_gateway_up", "1 if all gateways answered the last scrape.")
        self._gateway_in_flight = gauge("rollout_gateway_calls_in_flight", "Model calls that have no answer yet.")
        self._gateway_calls = counter("rollout_gateway_calls_total", "Answered model calls.")
        self._gateway_tokens = counter(
            "rollout_gateway_tokens_total",
            "Tokens of model calls; all but the sampled ones are prompt tokens.",
            ("kind",),
        )
        self._gateway_cache_breaks = counter(
            "rollout_gateway_cache_breaks_total",
            "Calls that continued a conversation which the engine's prefix cache no longer held.",
        )
        self._given_up_calls = counter(
            "rollout_gateway_given_up_calls_total",
            "Model calls whose clients hung up while a training service sampled them.",
        )
        self._given_up_tokens = counter(
            "rollout_gateway_given_up_tokens_total", "Tokens of these calls, which the service may bill.", ("kind",)
        )
        self._gateway_unjournaled = counter(
            "rollout_gateway_unjournaled_sessions_total",
            "Sessions that would end with their gateway, because the disk of its journal did not take them.",
        )
        self._gateway_dropped_lines = counter(
            "rollout_gateway_dropped_log_lines_total",
            "Lines that the gateways' logs lost, because their disk was full or did not answer.",
        )
        self._gateway_errors = counter("rollout_gateway_errors_total", "Error responses to model calls.", ("code",))
        self._steps: dict[int, _Seen] = {}
        self._services, self._gateways = _Seen(), _Seen()
        # Create the series that must exist from the start.
        self._rollouts.labels(Outcome.COMPLETED, "")
        for kind in _GIVEN_UP:
            self._given_up_tokens.labels(kind)
        for call in ("invoke", "stop"):
            for answer in ("granted", "throttled"):
                self._runtime_calls.labels(call, answer)

    def update(
        self,
        steps: Collection[MeteredStep],
        dispatcher: Dispatcher,
        buffer: RolloutBuffer,
        servers: Iterable[ServerState],
        gateway: GatewayStats | None,
    ) -> None:
        """Read the accounts of the run and its current steps. `gateway` is None if a gateway did not answer."""
        for step in steps:
            self._read_step(step)
        ledgers = [step.ledger for step in steps]
        phases = [ledger.phases() for ledger in ledgers]
        for phase in (Phase.PLANNED, Phase.DISPATCHING, Phase.RUNNING, Phase.SCORING):
            self._open_rollouts.labels(phase).set(sum(each[phase] for each in phases))
        self._open_sessions.set(sum(len(ledger.open_sessions) for ledger in ledgers))
        self._invoke_rate.set(dispatcher.calls.invoke_per_s)
        self._queue_up.set(not buffer.queue_down)
        for kind in ("refused", "stale", "dangling"):
            self._bad_messages.labels(kind).inc(self._services.growth(kind, getattr(buffer, kind)))
        up = [server.name.partition("-")[0] for server in servers if server.serving]
        for server in ("engine", "router"):
            self._servers_up.labels(server).set(up.count(server))
        self._gateway_up.set(gateway is not None)
        if gateway is not None:
            self._read_gateway(gateway)

    def end_step(self, step: MeteredStep, records: Sequence[RolloutRecord]) -> None:
        """Read an ended step and its records."""
        self._read_step(step)
        del self._steps[step.ledger.step]
        if records:
            began, ended = span(records)
            self._step_duration.observe(ended - began)
        for phase, seconds in vars(add(seconds_of(record) for record in records)).items():
            self._phase_seconds.labels(phase).inc(seconds)

    def record_event(self, event: ServingEvent) -> None:
        """Count an event of an engine, the router or a gateway."""
        self._server_events.labels(event.server.partition("-")[0], event.kind).inc()

    def _read_step(self, step: MeteredStep) -> None:
        seen, ledger = self._steps.setdefault(step.ledger.step, _Seen()), step.ledger
        for entry in _last(ledger.settled, seen.growth("settled", len(ledger.settled))):
            assert entry.outcome is not None
            reason = entry.reason if entry.reason in WHAT_TO_DO or not entry.reason else _OTHER
            self._rollouts.labels(entry.outcome, reason).inc()
            seconds = duration(entry)
            if entry.delivered and seconds is not None:
                self._duration.observe(seconds)
        for seconds in _last(step.latencies, seen.growth("latencies", len(step.latencies))):
            self._delivery.observe(seconds)
        for kind, value in (("duplicate", ledger.duplicates), ("late", ledger.late), ("unknown", ledger.unknown)):
            self._extra_results.labels(kind).inc(seen.growth(kind, value))
        self._read_calls(seen, "invoke", ledger.invokes)
        self._read_calls(seen, "stop", ledger.stops)

    def _read_calls(self, seen: _Seen, call: str, tally: CallTally) -> None:
        for answer, value in (("granted", tally.grants), ("throttled", tally.refusals)):
            self._runtime_calls.labels(call, answer).inc(seen.growth((call, answer), value))

    def _read_gateway(self, stats: GatewayStats) -> None:
        growth = self._gateways.growth
        self._gateway_in_flight.set(stats.calls_in_flight)
        self._gateway_calls.inc(growth("calls", stats.calls))
        self._gateway_cache_breaks.inc(growth("breaks", stats.cache_breaks))
        self._gateway_unjournaled.inc(growth("unjournaled", stats.unjournaled))
        self._gateway_dropped_lines.inc(growth("dropped lines", stats.dropped_log_lines))
        tokens = {
            "prompt": stats.prompt_tokens,
            "cached": stats.cached_tokens,
            "cache_unknown": stats.cache_unknown_tokens,
            "sampled": stats.sampled_tokens,
        }
        for kind, value in tokens.items():
            self._gateway_tokens.labels(kind).inc(growth(kind, value))
        # A gateway that has just started does not know them yet.
        if given_up := stats.engine_given_up:
            self._given_up_calls.inc(growth("given_up", given_up["calls"]))
            for kind in _GIVEN_UP:
                self._given_up_tokens.labels(kind).inc(growth(("given_up", kind), given_up[f"{kind}_tokens"]))
        for code, value in stats.errors.items():
            self._gateway_errors.labels(code).inc(growth((code,), value))


def _last(items: Sequence[Any], number: float) -> Sequence[Any]:
    return items[len(items) - int(number) :]


@asynccontextmanager
async def serve_metrics(
    config: ObserveConfig, metrics: RunMetrics, refresh: Callable[[], Awaitable[None]]
) -> AsyncIterator[str]:
    """Serve `/metrics` within this context, whose value is the URL. `refresh` is awaited before each response.

    Raises:
        StartupError: the port is taken.
    """
    assert config.metrics_port is not None
    host = config.metrics_host
    port = require_port(host, config.metrics_port, "the metrics endpoint", "observe.metrics_port")
    render = make_aiohttp_handler(metrics.registry)

    async def answer(request: web.Request) -> web.StreamResponse:
        await refresh()
        return await render(request)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        for address in listen_addresses(host):
            await web.TCPSite(runner, address, port).start()
        yield f"http://{host_port(host, port)}/metrics"
    finally:
        await runner.cleanup()
