"""Name the attributes of spans, and send spans to an OpenTelemetry collector, by OTLP over HTTP.

Invariants:

- Sending blocks no caller and fails no run: a thread sends batches, retries, and drops what is not accepted.
- The log reports lost spans once per outage, and their number when the outage ends.
- No span holds a prompt, a reply, a payload or a key.
- OpenTelemetry is imported only if a run sends traces. It comes with the extra `otel`.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

RUN_ID = "rl.run_id"
STEP = "rl.step"
TASK_ID = "rl.task_id"
ROLLOUT_ID = "rl.rollout_id"
ATTEMPT = "rl.attempt"
ATTEMPTS = "rl.attempts"
SESSION_ID = "rl.session_id"
OUTCOME = "rl.outcome"
REASON = "rl.reason"
REWARD = "rl.reward"
TRAINABLE = "rl.trainable"
GROUP_USABLE = "rl.group_usable"
REPLACEMENT = "rl.replacement"
SEGMENTS = "rl.segments"
TURNS = "rl.turns"
SAMPLED_TOKENS = "rl.sampled_tokens"
WEIGHT_VERSIONS = "rl.weight_versions"
ANNOUNCED = "rl.announced"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

Kind = Literal["internal", "client", "producer", "consumer"]
Value = str | bool | int | float | Sequence[str]

# Spans that wait to be sent take 1 KB each. Further ones are dropped.
_MAX_WAITING = 1 << 16
# Unix seconds in the year 2286.
_LATEST_S = 1e10


@dataclass(frozen=True)
class Span:
    """One span. `error` says why it failed; it is empty for success. Times are in unix seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    kind: Kind = "internal"
    error: str = ""
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids, of other traces."""


def check_installed() -> None:
    """Raise ConfigError unless the extra `otel` is installed."""
    try:
        installed = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        raise ConfigError(
            "observe.otlp_endpoint is set, and OpenTelemetry's exporter is not installed: install the extra otel "
            "(pip install '.[otel]'), or leave the setting out"
        )


class SpanSender:
    """Sends spans of one process to a collector."""

    def __init__(self, endpoint: str, service: str, close_s: float = 2.0, max_waiting: int = _MAX_WAITING) -> None:
        """Raise ConfigError unless the extra `otel` is installed.

        `endpoint` is the collector's URL without a path, and `service` the `service.name` of the spans, unless
        OTEL_SERVICE_NAME is set. OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS and the other variables of
        OpenTelemetry apply. A process that ends waits at most `close_s` for its collector.
        """
        check_installed()
        self._close_s = close_s
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource.create({SERVICE_NAME: service})
        self._resource = named.merge(OTELResourceDetector().detect())
        self._delivery = _Delivery(endpoint, max_waiting)
        self._exporter_log = logging.getLogger(OTLPSpanExporter.__module__)
        self._exporter_log.addFilter(self._delivery)
        self._exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        counted = self._delivery.counted(self._exporter)
        # A batch counts as waiting until it is sent, and is then no longer in this queue: it never fills up.
        self._processor = BatchSpanProcessor(counted, max_queue_size=max_waiting)

    def send(self, spans: Iterable[Span]) -> None:
        """Send spans that have ended, in the background."""
        for span in spans:
            if self._delivery.admit():
                self._send(span)

    def _send(self, span: Span) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(trace_id: int, span_id: int) -> SpanContext:
            return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        ended = ReadableSpan(
            span.name,
            context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else context(span.trace_id, span.parent_id),
            resource=self._resource,
            attributes=dict(span.attributes),
            links=[Link(context(*link)) for link in span.links],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=InstrumentationScope("rollout_backend"),
        )
        self._processor.on_end(ended)

    def close(self) -> None:
        """Send what waits, for `close_s` at most."""
        closing = threading.Thread(target=self._shut_down, daemon=True)
        closing.start()
        closing.join(self._close_s)
        if closing.is_alive():
            self._delivery.report("it did not answer before the end")
            # This ends the retries.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._delivery.end()

    def _shut_down(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        self._exporter_log.removeFilter(self._delivery)


class _Delivery(logging.Filter):
    """Counts the spans that wait and those that are lost, and logs each outage of a collector once.

    As a filter it replaces the exporter's own line for each try.
    """

    def __init__(self, endpoint: str, max_waiting: int) -> None:
        super().__init__()
        self._max_waiting = max_waiting
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._waiting = 0
        self._lost = 0
        self._failing = False

    def filter(self, record: logging.LogRecord) -> bool:
        self.report(record.getMessage())
        return False

    def admit(self) -> bool:
        """Return whether one more span may wait. Otherwise, count it as lost."""
        with self._lock:
            admitted = self._waiting < self._max_waiting
            if admitted:
                self._waiting += 1
            else:
                self._lost += 1
        if not admitted:
            self.report(f"{self._max_waiting:,} spans wait already")
        return admitted

    def counted(self, exporter: SpanExporter) -> SpanExporter:
        """Return the exporter with its results counted."""
        export = exporter.export

        def count(spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = export(spans)
            self._done(len(spans), accepted=result.name == "SUCCESS")
            return result

        exporter.export = count  # type: ignore[method-assign]
        return exporter

    def _done(self, spans: int, *, accepted: bool) -> None:
        with self._lock:
            self._waiting -= spans
            self._lost += 0 if accepted else spans
            recovered = self._failing and accepted and self._waiting <= self._max_waiting // 2
            lost = self._lost
            if recovered:
                self._failing, self._lost = False, 0
        if recovered:
            log.warning("the collector at %s accepts spans again; %s spans were lost", self._endpoint, f"{lost:,}")

    def report(self, why: str) -> None:
        """Log that spans are lost, once per outage."""
        with self._lock:
            known, self._failing = self._failing, True
        if not known:
            log.warning(
                "spans are lost while the collector at %s (observe.otlp_endpoint) does not accept them; "
                "the run continues: %s",
                self._endpoint,
                why,
            )

    def end(self) -> None:
        """Log how many spans the last outage has lost."""
        with self._lock:
            lost = self._lost + self._waiting
        if lost:
            log.warning("%s spans did not reach the collector at %s", f"{lost:,}", self._endpoint)


def _nanoseconds(seconds: float) -> int:
    """Convert a time to nanoseconds, within the range of OTLP: a container's clock may show any time."""
    return int(min(max(seconds, 0.0), _LATEST_S) * 1e9)
