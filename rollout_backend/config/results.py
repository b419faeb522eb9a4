"""The `storage`, `queue`, `collect`, `aws`, `observe` and `prices` sections."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollout_backend.base.addresses import ListenAddress
from rollout_backend.config.section import HttpUrl, Seconds, Section

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig


class QueueConfig(Section):
    enabled: bool = True
    """Announce results on SQS. If false, the backend finds results only by listing, which takes longer."""
    url: str | None = None
    """URL of an existing queue. Default: the run creates a queue and a dead-letter queue and deletes both at its
    end."""
    receivers: int = Field(default=2, ge=1, le=32)
    """Concurrent long polls. If messages wait, more are made, up to what `collect.max_fetches` allows."""
    wait_s: int = Field(default=20, ge=0, le=20)
    """Maximum duration of one long poll."""
    visibility_s: int = Field(default=60, ge=5, le=43200)
    """Visibility timeout of a received message, extended while its rollout is fetched. The message reappears if this
    process dies before it deletes it."""
    max_receives: int = Field(default=5, ge=1, le=1000)
    """Maximum receives of a message before it moves to the dead-letter queue. Applies to a queue that the run
    creates."""

    @field_validator("url")
    @classmethod
    def _is_a_standard_queue(cls, value: str | None) -> str | None:
        if value is not None and not re.match("https?://", value):
            raise ValueError("is no URL: a queue's begins with https://sqs.")
        if value is not None and value.endswith(".fifo"):
            raise ValueError(
                "names a FIFO queue, to which neither agents nor S3 announce results: use a standard one"
            )
        return value


class CollectConfig(Section):
    max_fetches: int = Field(default=64, ge=1)
    """Concurrent fetches from S3. About as many further announcements are received and wait; the rest of a backlog
    stays in the queue."""
    list_after_idle_s: Seconds = 10.0
    """The backend lists the step's prefix after this many seconds without an announcement, and at least every three
    times as many seconds. So a lost announcement delays its result by at most three times this."""
    list_interval_s: Seconds = 1.0
    """Interval between listings of the prefix while the queue is disabled."""


# S3 signs no URL for longer.
MAX_URL_S = 7 * 24 * 3600


class StorageConfig(Section):
    bucket: str = Field(min_length=3, max_length=63)
    """Bucket for results. It must exist. It may be [one of your own](../infra/README.md#a-bucket-of-your-own)."""
    prefix: str = ""
    """Prefix of every key; empty, or ends in a slash."""
    max_result_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Larger results, packed or unpacked, are refused and quarantined."""
    local_copies_gb: float | None = Field(default=None, ge=0)
    """Disk space for the copies of results and artifacts in the run's directory. The copies of the oldest steps are
    deleted first, and the last tenth of the disk, or 10 GB, stays free of copies. S3 has every result. Default: a
    quarter of the disk."""
    presigned: bool = False
    """Agents write results through URLs that are presigned for each attempt, so that their containers need no cloud
    credentials. They then announce nothing: S3 notifies `queue.url`, or the backend finds results by listing. See
    [security.md](security.md#without-cloud-credentials)."""

    @field_validator("bucket", mode="before")
    @classmethod
    def _is_a_name(cls, value: object) -> object:
        if isinstance(value, str) and ("/" in value or ":" in value):
            raise ValueError("must be the bucket's name alone, such as my-bucket: no s3://, no ARN and no path")
        return value

    @field_validator("prefix")
    @classmethod
    def _ends_in_slash(cls, value: str) -> str:
        if value and not re.fullmatch(r"(?:[A-Za-z0-9._-]+/)+", value):
            raise ValueError("must be empty, or path parts of letters, digits, '.', '_' and '-' that end in a slash")
        return value

    def check_run(self, run: RolloutConfig) -> None:
        if self.presigned and run.timeouts.session_key_s > MAX_URL_S:
            raise ValueError(
                f"storage.presigned: S3 signs no URL for longer than {MAX_URL_S} s, and timeouts.session_key_s is "
                f"{run.timeouts.session_key_s:g}: lower it"
            )


class AwsConfig(Section):
    region: str = "us-east-1"
    """Region of bucket and queue. The runtime's region follows from its ARN or its image."""
    endpoint_url: HttpUrl | None = None
    """Endpoint of S3 and SQS if not AWS, such as a local emulator. Agents read it from their own environment."""
    s3_endpoint_url: HttpUrl | None = None
    """Endpoint of S3 if it differs from `aws.endpoint_url`, for example an object store of your own. Agents: set
    AWS_ENDPOINT_URL_S3, which is also the default here unless `aws.endpoint_url` is set."""
    sqs_endpoint_url: HttpUrl | None = None
    """Endpoint of SQS if it differs from `aws.endpoint_url`. Agents: set AWS_ENDPOINT_URL_SQS, which is also the
    default here unless `aws.endpoint_url` is set."""

    def endpoint_of(self, service: Literal["s3", "sqs"]) -> str | None:
        """Return the endpoint of a service, or None for AWS's own."""
        return (self.s3_endpoint_url if service == "s3" else self.sqs_endpoint_url) or self.endpoint_url

    @property
    def agents_environment(self) -> dict[str, str]:
        """The environment variables that name the endpoints to an agent's AWS clients."""
        named = {"": self.endpoint_url, "_S3": self.s3_endpoint_url, "_SQS": self.sqs_endpoint_url}
        return {f"AWS_ENDPOINT_URL{service}": url for service, url in named.items() if url is not None}


class ObserveConfig(Section):
    """Metrics and traces of a run, for a monitoring system. See [metrics.md](metrics.md) and
    [tracing.md](tracing.md)."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on which the manager's process serves Prometheus metrics, under `/metrics`. 0: any free port. Default: no
    metrics."""
    metrics_host: ListenAddress = "127.0.0.1"
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
    prefill_million: Dollars | None = None
    """Price of a million prompt tokens of model calls at a training service. With this one and the next two,
    `rollout train` prints what each step's tokens cost. Default: it prints the tokens alone."""
    sample_million: Dollars | None = None
    """Price of a million sampled tokens."""
    training_million: Dollars | None = None
    """Price of a million tokens to train on."""
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
