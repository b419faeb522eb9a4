"""The settings: one frozen tree, read from YAML, the environment and overrides, checked before anything starts.

Later sources win: the YAML file, then environment variables (`ROLLOUT__STORAGE__BUCKET=...`), then overrides
(`storage.bucket=...`). Unknown keys are refused by name. Times are in seconds and end in `_s`; rates are per
second and end in `_per_s`; sizes are in bytes and end in `_bytes`.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agent_wrapper.contract import Identifier, Sampling
from rollout_backend.errors import ConfigError

ENV_PREFIX = "ROLLOUT__"
_MAX_URL_S = 7 * 24 * 3600
Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
_IMAGE = (
    r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/(?:[a-z0-9]+(?:[._-]+[a-z0-9]+)*/)*"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[a-f0-9]{64})?"
)
_OF_AN_IMAGE = frozenset(
    {
        "role",
        "name",
        "subnets",
        "security_groups",
        "environment",
        "idle_timeout_s",
        "max_lifetime_s",
        "ready_timeout_s",
    }
)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ModelConfig(_Section):
    path: Path
    """Folder of the model: weights, config, tokenizer, chat template."""
    name: str = ""
    """The name that agents ask for. Default: the folder's name."""
    renderer: str = "auto"
    """How messages become tokens and back: a name that the `renderers` package knows, `chatml` (ours, for ChatML
    models such as SmolLM2, with Hermes-style tools), `default` (the model's own template), or
    `package.module.Class` of your own. `auto`: the one that `renderers` has for a model of the folder's name, else
    `chatml` if it renders as the model's own template does, else `default`."""
    renderer_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the renderer by name, such as `{"enable_thinking": false}` for `qwen3` or
    `{"tool_parser": "qwen3", "reasoning_parser": "think"}` for `default`; a renderer of your own gets them as its
    config. Each renderer refuses what it does not know."""
    trust_remote_code: bool = False
    """Whether a tokenizer that is Python code of the model's own may run, as Kimi K2's is, here and in the servers.
    Such code can do whatever this process can, with all its keys and credentials: read it first."""
    context_length: int = Field(default=2048, ge=16)
    """Tokens of prompt and completion together that one model call may have."""

    @property
    def served_name(self) -> str:
        return self.name or self.path.name


class StorageConfig(_Section):
    bucket: str = Field(min_length=3, max_length=63)
    """Where results are written. It must exist."""
    prefix: str = ""
    """Put before every key; empty, or ends in a slash."""
    max_result_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """A result that is larger, packed or unpacked, is refused and quarantined."""
    presigned: bool = False
    """Whether agents write their results by URLs that are made for each attempt, so that their container needs no
    cloud credentials. They then announce nothing: S3 notifies `queue.url`, or results are found by listing. See
    [security.md](security.md#without-cloud-credentials)."""

    @field_validator("prefix")
    @classmethod
    def _ends_in_slash(cls, value: str) -> str:
        if value and not re.fullmatch(r"(?:[A-Za-z0-9._-]+/)+", value):
            raise ValueError("must be empty, or path parts of letters, digits, '.', '_' and '-' that end in a slash")
        return value


class QueueConfig(_Section):
    enabled: bool = True
    """False: nothing is announced and results are found by listing. A run still ends right, only slower."""
    url: str | None = None
    """An existing queue. Default: a queue and its dead-letter queue are made for the run and deleted after it."""
    receivers: int = Field(default=2, ge=1, le=32)
    """Long polls held open at once."""
    wait_s: int = Field(default=20, ge=0, le=20)
    """How long one poll waits for a message."""
    visibility_s: int = Field(default=60, ge=5, le=43200)
    """How long a message stays hidden while its rollout is fetched; it comes back if we die meanwhile."""
    max_receives: int = Field(default=5, ge=1, le=1000)
    """After so many receives without a delete a message goes to the dead-letter queue (of a queue made here)."""


class AwsConfig(_Section):
    region: str = "us-east-1"
    """Of bucket and queue. The runtime's region is in its ARN, or in its image's name."""
    endpoint_url: str | None = None
    """Of S3 and SQS, where they are not AWS's own (a local emulator). Agents get it through their own environment."""


class _RuntimeLimits(_Section):
    invoke_per_s: Rate = 6.0
    """Sessions started per second; keep it below your account's quota."""
    stop_per_s: Rate = 20.0
    """Sessions closed per second; likewise."""
    max_sessions: int = Field(default=256, ge=1)
    """Sessions open at once."""
    max_attempts: int = Field(default=5, ge=1)
    """Invokes of one rollout, each with a new session, before it ends as infra_error."""
    connect_timeout_s: Seconds = 10.0
    """Until a connection to the runtime stands."""
    read_timeout_s: Seconds = 60.0
    """The wrapper answers an invoke at once; what takes longer than this is a cold start gone wrong."""


class AgentCoreConfig(_RuntimeLimits):
    """AWS Bedrock AgentCore Runtime: one that exists, by its `arn`, or one made from an `image`. Quotas differ
    between accounts: set the rates below yours."""

    kind: Literal["agentcore"] = "agentcore"
    arn: str | None = None
    """Of a runtime that exists, which is used as it is. Either this or `image`."""
    image: str | None = None
    """The agent's container image, in ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG. A runtime is made
    from it before the run, and updated where these settings differ from it; it stays after the run, and costs nothing
    while it has no session. A new image needs a new tag to be noticed."""
    role: str | None = None
    """ARN of the role that the agents run under. Required with `image`."""
    name: str | None = None
    """Of the runtime made from `image`. Default: `rollout_`, and the name of the image's repository. Runs at one time
    that differ in image, role, network, environment or lifetimes need a name each."""
    subnets: tuple[str, ...] = ()
    """Private subnets for the agents, with `image`. Default: the public network."""
    security_groups: tuple[str, ...] = ()
    """Of the agents; required with `subnets`, and only with them."""
    environment: dict[str, str] = {}
    """Variables for the container, with `image`. No secrets: they can be read back."""
    idle_timeout_s: int = Field(default=120, ge=60, le=28800)
    """A session that has been idle so long is ended, with `image`. One whose agent is at work is not idle."""
    max_lifetime_s: int = Field(default=28800, ge=60, le=28800)
    """A session is ended after so long, with `image`."""
    ready_timeout_s: Seconds = 600.0
    """Until a runtime made from `image` is ready and its endpoint serves it."""
    qualifier: str = "DEFAULT"
    """The runtime's endpoint. DEFAULT serves the newest version; a runtime made from `image` has no other."""
    endpoint_url: str | None = None
    """Of data plane and control plane, where they are not AWS's own (the local stand-in)."""

    @field_validator("arn")
    @classmethod
    def _is_runtime_arn(cls, value: str | None) -> str | None:
        name = "[a-zA-Z][a-zA-Z0-9_]{0,47}-[a-zA-Z0-9]{10}"
        shape = rf"arn:aws[a-z-]*:bedrock-agentcore:[a-z0-9-]+:\d{{12}}:runtime/{name}"
        return _shaped(
            value,
            shape,
            "the ARN of an AgentCore runtime: arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME-0123456789",
        )

    @field_validator("image")
    @classmethod
    def _is_ecr_image(cls, value: str | None) -> str | None:
        right = "an image in ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"
        return _shaped(value, _IMAGE, f"{right}. AgentCore takes images from nowhere else")

    @field_validator("role")
    @classmethod
    def _is_role_arn(cls, value: str | None) -> str | None:
        return _shaped(
            value, r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "the ARN of a role: arn:aws:iam::ACCOUNT:role/NAME"
        )

    @field_validator("name")
    @classmethod
    def _is_runtime_name(cls, value: str | None) -> str | None:
        shape = "[a-zA-Z][a-zA-Z0-9_]{0,47}"
        return _shaped(value, shape, "a runtime's name: a letter, then at most 47 letters, digits and underscores")

    @field_validator("subnets", "security_groups")
    @classmethod
    def _are_ids(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kind = "subnet" if info.field_name == "subnets" else "sg"
        if len(values) > 16:
            raise ValueError(f"{len(values)} are named; AgentCore takes 16 at most")
        for value in values:
            _shaped(value, rf"{kind}-[0-9a-zA-Z]{{8,17}}", f"an id like {kind}-0123456789abcdef0")
        return values

    @field_validator("environment")
    @classmethod
    def _fits(cls, values: dict[str, str]) -> dict[str, str]:
        if len(values) > 50 or any(not 1 <= len(k) <= 100 or len(v) > 5000 for k, v in values.items()):
            raise ValueError("AgentCore takes 50 variables, names of 100 and values of 5,000 characters at most")
        return values

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.arn is None) == (self.image is None):
            raise ValueError("set arn, for a runtime that exists, or image, to have one made: one of the two")
        if self.image is None:
            stray = sorted(_OF_AN_IMAGE & self.model_fields_set)
            if stray:
                raise ValueError(f"{', '.join(stray)} belong to image; a runtime given by its arn is used as it is")
            return self
        if self.role is None:
            raise ValueError("image needs role, the ARN of the role that the agents run under")
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups belong together: set both, or neither")
        if self.qualifier != "DEFAULT":
            raise ValueError("a runtime made from image is called at its endpoint DEFAULT: leave qualifier out")
        if self.idle_timeout_s > self.max_lifetime_s:
            raise ValueError("idle_timeout_s must not be above max_lifetime_s")
        return self

    @property
    def region(self) -> str:
        """Where the runtime is: that of its ARN, or of its image."""
        return (self.arn.split(":") if self.arn else str(self.image).split("."))[3]

    @property
    def runtime_name(self) -> str:
        """Of the runtime made from `image`."""
        if self.name is not None:
            return self.name
        repository = re.split("[:@]", str(self.image).rpartition("/")[2])[0]
        return re.sub("[^a-zA-Z0-9]+", "_", f"rollout_{repository}")[:48]


class HttpConfig(_RuntimeLimits):
    """Any server that speaks the same container contract: a Kubernetes service, a container, a process."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://")
    """The server's root; `/invocations` is added. Such a server has no sessions to stop."""


class ServingConfig(_Section):
    kind: Literal["process", "ray", "external"] = "process"
    """`process`: SGLang servers on this machine. `ray`: one actor per server, placed on the cluster's GPUs.
    `external`: servers that somebody else runs, at `urls`."""
    servers: int = Field(default=1, ge=1)
    """How many. Counts for `process` and `ray`."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the servers run on."""
    python: Path | None = None
    """Interpreter of the environment that SGLang lives in. Default: for `cpu` the one that
    `rollout engine install` made, else this process's own."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the weights and of the computation."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of each server."""
    threads: int = Field(default=1, ge=1)
    """Of each server, on the CPU."""
    max_running_requests: int = Field(default=64, ge=1)
    """Of each server, at once; further ones wait in it."""
    max_total_tokens: int | None = Field(default=None, ge=1024)
    """Tokens in a server's cache; default: 32,768 on the CPU, what fits on a GPU."""
    extra_args: tuple[str, ...] = ()
    """Added to SGLang's command line as they are."""
    urls: tuple[str, ...] = ()
    """Of the servers, for `external`."""
    startup_timeout_s: Seconds = 300.0
    """From a server's start until it answers."""
    max_restarts: int = Field(default=3, ge=0)
    """How often a server that died is started again before the run stops with its log: of each engine, of the router
    and of each gateway."""

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        if (self.kind == "external") != bool(self.urls):
            raise ValueError("urls belong to kind=external, and only to it")
        if self.kind == "ray" and self.device == "cpu":
            raise ValueError("kind=ray places servers on GPUs; on the CPU use kind=process")
        return self


class RouterConfig(_Section):
    host: str = "127.0.0.1"
    """The address it listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port."""
    policy: Literal["manual", "cache_aware", "round_robin", "random"] = "manual"
    """`manual` keeps each session on one server, and so in its prefix cache."""
    startup_timeout_s: Seconds = 60.0
    """From its start until it answers."""


class GatewayConfig(_Section):
    kind: Literal["process", "ray"] = "process"
    """`process`: on this machine. `ray`: one actor per gateway process, spread over the cluster's machines."""
    processes: int = Field(default=1, ge=1, le=1024)
    """Gateway processes. Sessions are dealt among them; each holds what its own sessions sampled."""
    host: str = "127.0.0.1"
    """The address it listens on. Under `ray` a loopback address means that of the machine it was placed on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Of the first process; the next ones take the ports that follow. 0: any free ones."""
    public_url: str | None = None
    """How agents reach the gateway, where that is not its own address (a load balancer, a tunnel). With several
    processes it holds `{shard}`, the number of a process from 0, or `{port}`."""
    tls_certificate: Path | None = None
    """PEM file of the certificate, with what leads to its root, to serve HTTPS. Default: plain HTTP."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, without a passphrase."""
    agent_may_set: frozenset[Literal["temperature", "top_p", "top_k", "seed"]] = frozenset()
    """Sampling settings that an agent's own value decides. All others are the trainer's."""
    session_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one session may sample, over all its calls. The reply that reaches it is cut; the next call is
    answered 400. Calls at the same moment each have what was left when they began. Default: no cap."""
    constrained_decoding: Literal["allow", "refuse"] = "allow"
    """What an agent may force by `tool_choice` and `response_format`. `allow`: the engine holds the reply to that
    form; its tokens are no sample of the model's own distribution and are not trained. `refuse`: answered 400."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Of one model call's request; a larger one is refused."""
    max_images: int = Field(default=16, ge=0)
    """Images in one model call's request, its history included, where the model takes images. 0: none are taken."""
    max_image_pixels: int = Field(default=16 * 1024 * 1024, ge=1)
    """Of one image, width times height; a larger one is refused before it is unpacked."""
    session_image_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Of all images that one session's calls show, each counted once. They are part of the session's result, so
    `storage.max_result_bytes` must have room for them."""
    max_concurrent_calls: int = Field(default=1024, ge=1)
    """Model calls in flight in one process; one more is answered 429 with Retry-After."""
    max_queued_per_engine: int = Field(default=512, ge=1)
    """Requests that wait in the engines for a place in the batch, on average; with more a call is answered 429 with
    Retry-After. Counts where engines tell their load."""
    startup_timeout_s: Seconds = 60.0
    """From its start until it answers."""
    secret: SecretStr | None = Field(default=None, min_length=32)
    """Seals what was sampled, so that a container cannot alter it, and makes the run's session keys; best set in the
    environment, as ROLLOUT__GATEWAY__SECRET. Default: one made for the run and kept in OUTPUT_DIR/RUN_ID. A run that
    goes on on another machine needs the same one, or it runs its unfinished step anew."""
    require_seal: bool = True
    """Whether a result that could be trained must carry the gateway's seal. False: the agents' containers are
    believed."""

    @model_validator(mode="after")
    def _shards(self) -> Self:
        url = self.public_url or ""
        if self.public_url and self.processes > 1 and "{shard}" not in url and "{port}" not in url:
            raise ValueError(
                f"public_url must tell {self.processes} processes apart: put {{shard}} or {{port}} into it, such as "
                "https://gateway-{shard}.example.com, or set processes=1"
            )
        if "{port}" in url and not self.port:
            raise ValueError(
                "public_url holds {port}, so port must be set: a port that changes has no public address"
            )
        if self.port and self.port + self.processes - 1 > 65535:
            raise ValueError(f"port={self.port} leaves no room for {self.processes} processes: lower it")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


class RelayConfig(_Section):
    """For agents that cannot reach this side: a relay near them, to which this side dials out. Default: none. See
    [relay.md](relay.md)."""

    url: str = Field(pattern=r"^wss?://[^/?#]+(/[^?#]*)?$")
    """Of the relay: `wss://relay.example.com`. `ws://` has no TLS: whoever listens reads session keys and prompts."""
    public_url: str | None = Field(default=None, pattern=r"^https?://")
    """How agents reach the relay, where that differs from `url` (an address inside their cluster)."""
    key: SecretStr = Field(min_length=32)
    """Known to this side and the relay alone; best set in the environment, as ROLLOUT__RELAY__KEY."""
    reconnect_s: Seconds = 30.0
    """After so long without a connection to the relay, calls in flight end."""
    heartbeat_s: Seconds = 15.0
    """A connection that is silent is asked this often whether it is alive, and given up half as long after."""
    startup_timeout_s: Seconds = 60.0
    """Until the relay is reached."""

    @property
    def agents_url(self) -> str:
        """Where agents reach the relay."""
        return (self.public_url or self.own_url).rstrip("/")

    @property
    def own_url(self) -> str:
        """Where this side reaches the relay by plain HTTP calls."""
        return re.sub("^ws", "http", self.url).rstrip("/")


class GroupConfig(_Section):
    size: int = Field(default=1, ge=1)
    """Rollouts of each task."""
    policy: Literal["strict", "min_viable", "replace"] = "min_viable"
    """What makes a group usable: `strict`, every planned rollout; `min_viable`, at least `min_viable` of them;
    `replace` does as min_viable and starts a new rollout for each one lost to the infrastructure."""
    min_viable: int | None = Field(default=None, ge=1)
    """Default: 2, or 1 where groups have one rollout."""
    max_replacements: int = Field(default=2, ge=0)
    """Of one group, under `replace`."""
    target_groups: int | None = Field(default=None, ge=1)
    """The step ends as soon as so many groups are complete; the rest is cancelled. Default: all."""
    extra: int = Field(default=0, ge=0)
    """Rollouts planned of each task beyond its size. As soon as `size` of a group are trainable the rest of it is
    cancelled. Groups are complete sooner, of the shorter rollouts: the report shows by how much."""
    straggler_after: float | None = Field(default=None, gt=0, le=1)
    """Once this part of a step's rollouts is finished, of those not lost or cancelled, the others have
    `straggler_factor` times the 95th percentile of what the finished took. Default: `timeouts.agent_s` alone."""
    straggler_factor: float = Field(default=2.0, ge=1)
    """How much longer than the finished a rollout may run, from its own start, before it ends as a straggler."""
    set_aside_after: int | None = Field(default=3, ge=1)
    """A task that was lost to the infrastructure in all its rollouts in so many steps or takes in a row, while others
    were not, is not dispatched again in this run. Null: always again."""

    @model_validator(mode="after")
    def _viable(self) -> Self:
        if self.min_viable is not None and self.min_viable > self.size:
            raise ValueError(f"min_viable={self.min_viable} is more than size={self.size}")
        return self

    @property
    def needed(self) -> int:
        """Trainable rollouts that make a group usable."""
        if self.policy == "strict":
            return self.size
        return self.min_viable if self.min_viable is not None else min(2, self.size)


class BreakerConfig(_Section):
    """When a run is stopped, with a diagnosis, instead of spending more on rollouts that are lost in one way."""

    consecutive: int | None = Field(default=20, ge=1)
    """So many rollouts lost to the infrastructure for one reason, with none let through meanwhile, stop the run, if
    no more than that are running. Over all steps. Null: never."""
    over_s: float = Field(default=30.0, ge=0)
    """And so long must have passed from the first of them to the last: one burst is no pattern."""


class TimeoutConfig(_Section):
    """The ladder: model_call < agent, agent + publish_grace < collection < token. Checked at start-up."""

    model_call_s: Seconds = 300.0
    """One model call, with all its retries."""
    agent_s: Seconds = 1800.0
    """From a rollout's dispatch until its agent must have returned."""
    publish_grace_s: Seconds = 60.0
    """From an agent's deadline until its rollout, not having arrived, is declared timed out. Holds the session's
    start and the writing of the result."""
    collection_s: Seconds = 3600.0
    """From the start of a step until it ends, with what has arrived."""
    token_s: Seconds = 5400.0
    """From a rollout's dispatch until its key opens nothing any more."""

    @model_validator(mode="after")
    def _ladder(self) -> Self:
        rungs = {
            "model_call_s": self.model_call_s,
            "agent_s": self.agent_s,
            "agent_s + publish_grace_s": self.agent_s + self.publish_grace_s,
            "collection_s": self.collection_s,
            "token_s": self.token_s,
        }
        names = list(rungs)
        for lower, upper in itertools.pairwise(names):
            if not rungs[lower] < rungs[upper]:
                raise ValueError(
                    f"timeouts must nest, and {lower} ({rungs[lower]:g}) is not below {upper} ({rungs[upper]:g}): "
                    f"raise {upper} or lower {lower}"
                )
        return self


class CollectConfig(_Section):
    fetches: int = Field(default=32, ge=1)
    """Results fetched from S3 at once."""
    quiet_s: Seconds = 10.0
    """After so long without an announcement the step's prefix is listed, and again each so long."""
    no_queue_sweep_s: Seconds = 1.0
    """How often the prefix is listed while the queue is switched off."""
    retokenise: bool = False
    """Whether results that carry only messages are made trainable, by rendering them with the model's renderer. Their
    tokens are then a guess, without logprobs. False: their rewards count in evaluation, and they are not trained."""


class JanitorConfig(_Section):
    """A small process beside each run. Should the run die without a word, it deletes the queues that were made for it
    and stops the sessions that are open. A run that ends by itself does both, and it with it."""

    enabled: bool = True
    """False: what a killed run leaves is left. Sessions then end at the runtime's idle timeout."""
    grace_s: Seconds = 300.0
    """From the run's death until it acts, unless the run has been started again, under the same `run_id`, by then."""


def _shaped(value: str | None, shape: str, what: str) -> str | None:
    if value is not None and not re.fullmatch(shape, value):
        raise ValueError(f"{value!r} is not {what}")
    return value


def _new_run_id() -> str:
    return f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


class RolloutConfig(_Section):
    """The whole of it. Only `model.path`, `storage.bucket` and `runtime` have no default."""

    run_id: Identifier = Field(default_factory=_new_run_id)
    """Names the run in S3, in its queue and in its folder. Default: the time, and four letters."""
    model: ModelConfig
    storage: StorageConfig
    runtime: Annotated[AgentCoreConfig | HttpConfig, Field(discriminator="kind")]
    aws: AwsConfig = AwsConfig()
    queue: QueueConfig = QueueConfig()
    serving: ServingConfig = ServingConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    relay: RelayConfig | None = None
    sampling: Sampling = Sampling()
    group: GroupConfig = GroupConfig()
    breakers: BreakerConfig = BreakerConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    collect: CollectConfig = CollectConfig()
    janitor: JanitorConfig = JanitorConfig()
    output_dir: Path = Path("runs")
    """Logs and step reports go to OUTPUT_DIR/RUN_ID."""

    @model_validator(mode="after")
    def _router_in_reach(self) -> Self:
        if self.gateway.kind == "ray" and self.router.host in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                "gateway.kind=ray puts gateways on other machines, which must reach the router: "
                "set router.host to 0.0.0.0, or to an address that this machine has among them"
            )
        return self

    @model_validator(mode="after")
    def _urls_live_long_enough(self) -> Self:
        if self.storage.presigned and self.timeouts.token_s > _MAX_URL_S:
            raise ValueError(
                f"storage.presigned: S3 signs no URL for longer than {_MAX_URL_S} s, and timeouts.token_s is "
                f"{self.timeouts.token_s:g}: lower it"
            )
        return self

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if self.relay is not None and (self.gateway.public_url or self.gateway.tls_certificate):
            raise ValueError(
                "with relay, agents reach the relay and not the gateway: leave out gateway.public_url and "
                "gateway.tls_certificate, and set relay.public_url where it differs from relay.url"
            )
        return self

    @model_validator(mode="after")
    def _sessions_live_long_enough(self) -> Self:
        runtime, needed = self.runtime, self.timeouts.agent_s + self.timeouts.publish_grace_s
        if isinstance(runtime, AgentCoreConfig) and runtime.image and runtime.max_lifetime_s < needed:
            raise ValueError(
                f"runtime.max_lifetime_s ({runtime.max_lifetime_s}) ends sessions before timeouts.agent_s + "
                f"timeouts.publish_grace_s ({needed:g}): raise it, or lower them"
            )
        return self

    @classmethod
    def parse(cls, data: object) -> Self:
        """Checks plain values.

        Raises:
            ConfigError: names every key at fault.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @property
    def uses_queue(self) -> bool:
        """Whether there is a queue to listen to. Agents without credentials send nothing to one made for the run."""
        return self.queue.enabled and not (self.storage.presigned and self.queue.url is None)

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.run_id


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
) -> RolloutConfig:
    """Reads the settings from a YAML file, the environment and overrides of the form `a.b=value`.

    Values of the environment and of overrides are read as YAML, so `3` is a number and `[a, b]` a list.
    `base` lies below the file, and `top` above all: what a caller such as the local cloud suggests, and knows.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or wrong; each is named.
    """
    tree: dict[str, Any] = dict(base or {})
    if path is not None:
        _merge(tree, _read_yaml(Path(path)))
    for name, value in sorted((os.environ if env is None else env).items()):
        if name.startswith(ENV_PREFIX):
            _merge(tree, _nest(name.removeprefix(ENV_PREFIX).lower().split("__"), value, name))
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r} must look like key.key=value")
        _merge(tree, _nest(key.split("."), value, override))
    _merge(tree, top or {})
    return RolloutConfig.parse(tree)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the settings {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a map of settings")
    return data


def _nest(keys: list[str], text: str, where: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {where!r} is not YAML: {error}") from None
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        below = into.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and not _other_kind(below, value):
            into[key] = dict(below)
            _merge(into[key], value)
        else:
            into[key] = value


def _other_kind(below: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """A section of another kind replaces the one below it: their settings have nothing to do with each other."""
    return "kind" in below and "kind" in value and below["kind"] != value["kind"]


def _explain(error: ValidationError) -> str:
    lines = ["the settings cannot be used:"]
    for item in error.errors(include_url=False):
        # A discriminated union puts its tag into the path; a user knows keys only.
        key = ".".join(str(part) for part in item["loc"] if part not in ("agentcore", "http")) or "settings"
        match item["type"]:
            case "extra_forbidden":
                lines.append(f"  {key}: no such setting; remove it, or mend its spelling")
            case "missing":
                lines.append(f"  {key}: is missing")
            case _:
                lines.append(f"  {key}: {item['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
