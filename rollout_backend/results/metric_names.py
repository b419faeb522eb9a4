"""The Prometheus metrics of a run: their names, types, labels and buckets.

Invariants:

- `docs/metrics.md` lists these metrics, and the dashboard in `infra/` uses no others; tests compare them.
- No label has a value that an agent, a task or a rollout chooses, so the number of series is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
