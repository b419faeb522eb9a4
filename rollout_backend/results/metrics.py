"""The Prometheus metrics of one run, and the endpoint that serves them.

Invariants:

- Metrics are read from the run's accounts at each scrape and at the end of each step. No other code reports to them,
  so they cost nothing while disabled.
- Counters never decrease. When a gateway restarts, its earlier counts are kept, except for calls since the last
  scrape.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from agent_wrapper.contract import Outcome
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.config import ObserveConfig, RolloutConfig
from rollout_backend.core.ledger import CallTally, Ledger, Phase
from rollout_backend.core.reasons import WHAT_TO_DO
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.summary import add, duration, seconds_of, span
from rollout_backend.serving.engine_fleet import ServerState
from rollout_backend.serving.server_process import require_port
from rollout_backend.serving.supervisor import ServingEvent

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
MINUTES = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` are those of each of its series."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


RUN = Metric("rollout_run_info", "gauge", "1; the labels name the run.", ("run_id", "model"))
ROLLOUTS = Metric("rollout_rollouts_total", "counter", "Settled rollouts.", ("outcome", "reason"))
OPEN_ROLLOUTS = Metric("rollout_open_rollouts", "gauge", "Rollouts that are not settled.", ("phase",))
OPEN_SESSIONS = Metric("rollout_open_sessions", "gauge", "Sessions that may be open.")
DURATION = Metric(
    "rollout_duration_seconds",
    "histogram",
    "From a rollout's last invoke until its result settled it.",
    buckets=MINUTES,
)
DELIVERY = Metric(
    "rollout_delivery_seconds",
    "histogram",
    "From a result's announcement, which follows its PUT at once, until the result was validated.",
    buckets=SECONDS,
)
EXTRA_RESULTS = Metric(
    "rollout_extra_results_total", "counter", "Results and announcements that settled no rollout.", ("kind",)
)
STEP_DURATION = Metric(
    "rollout_step_duration_seconds",
    "histogram",
    "From a step's first plan until its last rollout was settled.",
    buckets=MINUTES,
)
PHASE_SECONDS = Metric(
    "rollout_phase_seconds_total", "counter", "Seconds of rollouts by phase; added when their step ends.", ("phase",)
)
RUNTIME_CALLS = Metric(
    "rollout_runtime_calls_total", "counter", "Calls to the agents' runtime that it answered.", ("call", "answer")
)
INVOKE_RATE = Metric("rollout_invoke_rate_per_second", "gauge", "Invokes that are admitted per second at most.")
QUEUE_UP = Metric("rollout_queue_up", "gauge", "1 if the queue answers; 0 if results are found by listing.")
BAD_MESSAGES = Metric(
    "rollout_queue_bad_messages_total", "counter", "Messages of the queue that led to no result.", ("kind",)
)
SERVERS_UP = Metric("rollout_servers_up", "gauge", "Servers that serve.", ("server",))
SERVER_EVENTS = Metric(
    "rollout_server_events_total", "counter", "Starts, losses and restarts of servers.", ("server", "event")
)
GATEWAY_UP = Metric("rollout_gateway_up", "gauge", "1 if all gateways answered the last scrape.")
GATEWAY_IN_FLIGHT = Metric("rollout_gateway_calls_in_flight", "gauge", "Model calls that have no answer yet.")
GATEWAY_CALLS = Metric("rollout_gateway_calls_total", "counter", "Answered model calls.")
GATEWAY_TOKENS = Metric(
    "rollout_gateway_tokens_total",
    "counter",
    "Tokens of model calls; all but the sampled ones are prompt tokens.",
    ("kind",),
)
GATEWAY_CACHE_BREAKS = Metric(
    "rollout_gateway_cache_breaks_total",
    "counter",
    "Calls that continued a conversation which the engine's prefix cache no longer held.",
)
GATEWAY_ERRORS = Metric("rollout_gateway_errors_total", "counter", "Error responses to model calls.", ("code",))

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


_OTHER = "other"  # replaces reasons that agents chose
_SHUTDOWN_S = 1.0


class _Seen:
    """The last values of growing counts."""

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
        self._metrics = {metric: _make(metric, self.registry) for metric in METRICS}
        self._steps: dict[int, _Seen] = {}
        self._services, self._gateways = _Seen(), _Seen()
        self._set(RUN, 1, config.run_id, config.model.served_name)
        self._count(ROLLOUTS, 0, Outcome.COMPLETED, "")
        for call in ("invoke", "stop"):
            for answer in ("granted", "throttled"):
                self._count(RUNTIME_CALLS, 0, call, answer)

    # --- what it reads ------------------------------------------------------------------------------------

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
            self._set(OPEN_ROLLOUTS, sum(each[phase] for each in phases), phase)
        self._set(OPEN_SESSIONS, sum(len(ledger.open_sessions) for ledger in ledgers))
        self._set(INVOKE_RATE, dispatcher.invoke_per_s)
        self._set(QUEUE_UP, not buffer.queue_down)
        for kind in ("refused", "stale", "dangling"):
            self._count(BAD_MESSAGES, self._services.growth(kind, getattr(buffer, kind)), kind)
        up = [server.name.partition("-")[0] for server in servers if server.serving]
        for server in ("engine", "router"):
            self._set(SERVERS_UP, up.count(server), server)
        self._set(GATEWAY_UP, gateway is not None)
        if gateway is not None:
            self._read_gateway(gateway)

    def end_step(self, step: MeteredStep, records: Sequence[RolloutRecord]) -> None:
        """Read an ended step and its records."""
        self._read_step(step)
        del self._steps[step.ledger.step]
        if records:
            began, ended = span(records)
            self._observe(STEP_DURATION, ended - began)
        for phase, seconds in vars(add(seconds_of(record) for record in records)).items():
            self._count(PHASE_SECONDS, seconds, phase)

    def record_event(self, event: ServingEvent) -> None:
        """Count an event of an engine, the router or a gateway."""
        self._count(SERVER_EVENTS, 1, event.server.partition("-")[0], event.kind)

    def _read_step(self, step: MeteredStep) -> None:
        seen, ledger = self._steps.setdefault(step.ledger.step, _Seen()), step.ledger
        for entry in _last(ledger.settled, seen.growth("settled", len(ledger.settled))):
            assert entry.outcome is not None
            reason = entry.reason if entry.reason in WHAT_TO_DO or not entry.reason else _OTHER
            self._count(ROLLOUTS, 1, entry.outcome, reason)
            seconds = duration(entry)
            if entry.delivered and seconds is not None:
                self._observe(DURATION, seconds)
        for seconds in _last(step.latencies, seen.growth("latencies", len(step.latencies))):
            self._observe(DELIVERY, seconds)
        for kind, value in (("duplicate", ledger.duplicates), ("late", ledger.late), ("unknown", ledger.unknown)):
            self._count(EXTRA_RESULTS, seen.growth(kind, value), kind)
        self._read_calls(seen, "invoke", ledger.invokes)
        self._read_calls(seen, "stop", ledger.stops)

    def _read_calls(self, seen: _Seen, call: str, tally: CallTally) -> None:
        for answer, value in (("granted", tally.grants), ("throttled", tally.refusals)):
            self._count(RUNTIME_CALLS, seen.growth((call, answer), value), call, answer)

    def _read_gateway(self, stats: GatewayStats) -> None:
        growth = self._gateways.growth
        self._set(GATEWAY_IN_FLIGHT, stats.calls_in_flight)
        self._count(GATEWAY_CALLS, growth("calls", stats.calls))
        self._count(GATEWAY_CACHE_BREAKS, growth("breaks", stats.cache_breaks))
        tokens = {
            "prompt": stats.prompt_tokens,
            "cached": stats.cached_tokens,
            "cache_unknown": stats.cache_unknown_tokens,
            "sampled": stats.sampled_tokens,
        }
        for kind, value in tokens.items():
            self._count(GATEWAY_TOKENS, growth(kind, value), kind)
        for code, value in stats.errors.items():
            self._count(GATEWAY_ERRORS, growth((code,), value), code)

    # --- what it writes -----------------------------------------------------------------------------------

    def _series(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        made = self._metrics[metric]
        return made.labels(*labels) if labels else made

    def _set(self, metric: Metric, value: float, *labels: str) -> None:
        self._series(metric, labels).set(value)

    def _count(self, metric: Metric, growth: float, *labels: str) -> None:
        self._series(metric, labels).inc(growth)

    def _observe(self, metric: Metric, value: float, *labels: str) -> None:
        self._series(metric, labels).observe(value)


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    match metric.kind:
        case "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case "histogram":
            return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


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
        await web.TCPSite(runner, host, port).start()
        yield f"http://{host}:{port}/metrics"
    finally:
        await runner.cleanup()
