"""The `observe` section."""

from __future__ import annotations

from pydantic import Field

from rollout_backend.config.section import HttpUrl, Section


class ObserveConfig(Section):
    """Metrics and traces of a run, for a monitoring system. See [metrics.md](metrics.md) and
    [tracing.md](tracing.md)."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on which the manager's process serves Prometheus metrics, under `/metrics`. 0: any free port. Default: no
    metrics."""
    metrics_host: str = "127.0.0.1"
    """Address on which it listens. Prometheus on another machine needs 0.0.0.0, or an address that it can reach."""
    otlp_endpoint: HttpUrl | None = None
    """URL of an OpenTelemetry collector that accepts OTLP over HTTP, such as `http://127.0.0.1:4318`. It gets a trace
    of each rollout. Needs the extra `otel`. Default: no traces."""
