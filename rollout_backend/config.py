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
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agent_wrapper.contract import Identifier, Sampling
from rollout_backend.errors import ConfigError

ENV_PREFIX = "ROLLOUT__"
Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]


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
    """Of bucket and queue. The runtime's region is in its ARN."""
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
    """AWS Bedrock AgentCore Runtime. Quotas differ between accounts: set the rates below yours."""

    kind: Literal["agentcore"] = "agentcore"
    arn: str
    """Of the agent runtime."""
    qualifier: str = "DEFAULT"
    """The runtime's endpoint. DEFAULT serves the newest version."""
    endpoint_url: str | None = None
    """Of the data plane, where it is not AWS's own (the local stand-in)."""

    @field_validator("arn")
    @classmethod
    def _is_runtime_arn(cls, value: str) -> str:
        name = "[a-zA-Z][a-zA-Z0-9_]{0,47}-[a-zA-Z0-9]{10}"
        if not re.fullmatch(rf"arn:aws[a-z-]*:bedrock-agentcore:[a-z0-9-]+:\d{{12}}:runtime/{name}", value):
            raise ValueError(
                f"{value!r} is not the ARN of an AgentCore runtime: "
                "arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME-0123456789"
            )
        return value


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
    """How often a server that died is started again before the run stops with its log."""

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
    host: str = "127.0.0.1"
    """The address it listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port."""
    public_url: str | None = None
    """How agents reach the gateway, where that is not its own address (a load balancer, a tunnel)."""
    agent_may_set: frozenset[Literal["temperature", "top_p", "top_k", "seed"]] = frozenset()
    """Sampling settings that an agent's own value decides. All others are the trainer's."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Of one model call's request; a larger one is refused."""
    max_concurrent_calls: int = Field(default=512, ge=1)
    """Model calls in flight; one more is answered 429 with Retry-After."""
    startup_timeout_s: Seconds = 60.0
    """From its start until it answers."""


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
    sampling: Sampling = Sampling()
    group: GroupConfig = GroupConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    collect: CollectConfig = CollectConfig()
    output_dir: Path = Path("runs")
    """Logs and step reports go to OUTPUT_DIR/RUN_ID."""

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
