"""The `observe` and `prices` sections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout_backend.config.section import HttpUrl, Section

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig


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


Dollars = Annotated[float, Field(ge=0)]


class PriceConfig(Section):
    """Prices in dollars, for an estimate of what a run costs. The estimate is shown once `session_vcpus` and
    `session_gb`, or `gpu_hour`, are set. Defaults are AWS prices of November 2026 in us-east-1; check yours."""

    platform: Literal["V1", "V2"] | None = None
    """AgentCore's platform, whose prices are the defaults of `vcpu_hour` and `gb_hour`. Default: that of the runtime,
    as AgentCore describes it when the run starts."""
    vcpu_hour: Dollars | None = None
    """Price of a vCPU-hour of agents. Default: 0.0895 on V1, 0.1276 on V2. AgentCore Runtime bills the CPU time used;
    waiting for the model is free."""
    gb_hour: Dollars | None = None
    """Price of a GB-hour of agents, for the whole time of a session. Default: 0.00945 on V1, 0.0169 on V2."""
    session_vcpus: Dollars | None = None
    """vCPUs that a session uses on average while it does not wait for the model: measure your agent. Set it with
    `session_gb`. Default: the estimate leaves sessions out, with their S3 and SQS requests."""
    session_gb: Dollars | None = None
    """Memory of a session in GB. AgentCore Runtime bills the peak so far."""
    s3_put_million: Dollars = 5.0
    """Price of a million PUT requests. A result takes one."""
    s3_get_million: Dollars = 0.4
    """Price of a million GET requests. A result takes one."""
    sqs_million: Dollars = 0.4
    """Price of a million SQS requests. A result takes three: send, receive, delete."""
    gpu_hour: Dollars | None = None
    """Price of a GPU-hour. Default: the estimate leaves GPUs out."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs of the run, billed for the duration of each step. Default: `serving.servers` times the GPUs of a server;
    required with `gpu_hour` if `serving.kind` is neither `process` nor `ray`, or if `serving.servers` is `auto`."""

    @model_validator(mode="after")
    def _sessions_are_described(self) -> Self:
        if (self.session_vcpus is None) != (self.session_gb is None):
            raise ValueError("set both session_vcpus and session_gb, or neither")
        return self

    def check_run(self, run: RolloutConfig) -> None:
        if self.gpu_hour is not None and run.gpus is None:
            raise ValueError(
                f"prices.gpu_hour with serving.kind={run.serving.kind} and serving.servers={run.serving.servers} "
                "also needs prices.gpus"
            )
