"""The `runtime` section: one class per runtime kind.

To add a kind, define a subclass of `RuntimeConfig` here, add it to `RUNTIME_KINDS`, and write the class that
`implementation` names in `rollout_backend/agents/runtimes/`. A kind that is not in `RUNTIME_KINDS` is the import path
of a `RuntimeConfig` subclass in any package, such as `my_package.my_runtime.MyConfig`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    SecretStr,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agent_wrapper.contract import PAYLOAD_VARIABLE
from rollout_backend.base.names import derived_name
from rollout_backend.config.section import (
    HttpUrl,
    Rate,
    Seconds,
    Section,
    check_matches,
    import_kind,
    kind_choices,
    matching,
)

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig

_IMAGE = (
    r"(?:\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?|public\.ecr\.aws)/(?:[a-z0-9]+(?:[._-]+[a-z0-9]+)*/)*"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[a-f0-9]{64})?"
)
_TASK_IMAGE = r"[^{}]+\{task\}[^{}]*"
_PUBLIC = "public.ecr.aws/"
_IMAGE_FORM = (
    "an image in ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG, or public.ecr.aws/REPOSITORY:TAG. "
    "AgentCore pulls images from ECR only"
)
_NAME = "[a-zA-Z][a-zA-Z0-9_]{0,47}"
_NAME_FORM = "a runtime's name: a letter, then at most 47 letters, digits and underscores"
_ARN = rf"arn:aws[a-z-]*:bedrock-agentcore:[a-z0-9-]+:\d{{12}}:runtime/{_NAME}-[a-zA-Z0-9]{{10}}"
_ARN_FORM = "the ARN of an AgentCore runtime: arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME-0123456789"
_ROLE = r"arn:aws[a-z-]*:iam::\d{12}:role/.+"
_PROVIDER = (
    r"arn:aws[a-z-]*:bedrock-agentcore:[a-z0-9-]+:\d{12}:capacity-provider/[a-zA-Z][a-zA-Z0-9_]{0,47}-[a-zA-Z0-9]{10}"
)
# AgentCore's limits on a session's lifetime.
_MICROVM_S, _INSTANCE_S = 28_800, 1_209_600
_DNS_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_TOLERATION = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})
_RAY_ENVIRONMENT = frozenset({"env_vars", "pip"})
# AgentCore's quota of active sessions outside the large regions.
SMALL_REGION_SESSIONS = 2_500
# The quota of these regions is the default of `max_sessions`.
LARGE_REGIONS = frozenset({"us-east-1", "us-west-2"})
DEFINITION = (
    "environment",
    "idle_timeout_s",
    "max_lifetime_s",
    "platform_version",
    "warmup_path",
    "min_memory_mib",
    "capacity_provider",
)
"""The settings of AgentCore that describe a runtime, and not the runs on it."""
_IMAGE_ONLY = {
    *DEFINITION, "role", "name", "subnets", "security_groups", "image_region", "task_image", "ready_timeout_s",
}  # fmt: skip


def _split(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


class RuntimeConfig(Section):
    """Settings of every runtime. A kind with another default lists the setting again."""

    implementation: ClassVar[str]
    """Import path of the `AgentRuntime` class that these settings open."""
    payload_in_file: ClassVar[bool] = False
    """Whether agents read the payload from a file, and not from an HTTP request."""

    kind: str
    """Kind of the runtime."""
    agent_protocol: Literal[
        "rollout", "agentcore-rl-toolkit", "agentcore-runtime-app", "sagemaker-job-runtime", "verl-4216"
    ] = "rollout"
    """How agents are wrapped. `rollout`: agent_wrapper, or your own implementation of the contract.
    `agentcore-rl-toolkit`: `AgentCoreRLApp`, unchanged. `agentcore-runtime-app`: `AgentCoreRuntimeApp` of the same
    package. `verl-4216`: the app of verl's pull request 4216. See [toolkit-agents.md](toolkit-agents.md).
    `sagemaker-job-runtime`: agents for SageMaker's multi-turn RL, unchanged. See
    [sagemaker-agents.md](sagemaker-agents.md)."""
    poll_interval_s: Seconds = 10.0
    """Interval between polls of a session for its result, with `agent_protocol: agentcore-runtime-app`. Each poll is
    an invoke within `invoke_per_s`, and takes turns with those of new sessions. Before a rollout ends as `no_result`,
    its session is polled once more, ahead of all other calls."""
    invoke_per_s: Rate = 100.0
    """Maximum sessions started per second. If the runtime refuses invokes (429, 402, 5xx), the rate adapts to what it
    grants, and the report shows that rate. Refused invokes are retried until the step's deadline."""
    stop_per_s: Rate = 100.0
    """Maximum sessions stopped per second. The rate adapts in the same way."""
    calls_per_s: Rate | None = None
    """Maximum invokes and stops together per second, for accounts that count both in one quota (older AgentCore
    accounts: 25). Calls that finish rollouts take priority. Null: each kind of call has its own quota."""
    max_sessions: int = Field(default=256, ge=1)
    """Maximum open sessions."""
    max_attempts: int = Field(default=5, ge=1)
    """Maximum attempts of one rollout, each in a new session, before it ends as infra_error. Only calls that may have
    opened a session count. The pause between attempts starts at 5 s and triples, so five attempts span three
    minutes."""
    connect_timeout_s: Seconds = 10.0
    """Timeout of connecting to the runtime."""
    read_timeout_s: Seconds = 60.0
    """Timeout of an invoke. The wrapper answers at once, so a longer wait is a failed cold start. With
    `agent_protocol: sagemaker-job-runtime`, an agent that has not answered by then counts as started."""

    @property
    def invokes_last(self) -> bool:
        """Return whether agents answer their invoke when they have finished. Stops are then sent while invokes are
        in flight."""
        return self.agent_protocol == "sagemaker-job-runtime"

    @property
    def connections(self) -> int:
        """Return the number of connections to the runtime.

        Waiting for one would count towards a call's time. So each session, whose container may answer an invoke or a
        poll late or never, has one, and others are left for stops.
        """
        return self.max_sessions + min(256, self.max_sessions)

    @property
    def invoke_timeout_s(self) -> float:
        """Return the timeout of an invoke in an adapter. If agents answer late, the caller limits their invokes."""
        return _INSTANCE_S if self.invokes_last else self.read_timeout_s

    @property
    def invoke_limit_s(self) -> float:
        """Return the seconds after which an invoke has failed, whatever the adapter does."""
        return 60.0 + 2 * (self.connect_timeout_s + self.read_timeout_s)

    @property
    def stop_limit_s(self) -> float:
        """Return the seconds after which a stop has failed, whatever the adapter does. They are few, because a stop
        can be repeated."""
        return 30.0

    @property
    def agents_host(self) -> str | None:
        """Return the name or the address of the machine that runs the agents; None if the settings do not say."""
        return None

    def check_session_lifetime(self, needed_s: float) -> None:
        """Raise ValueError if these settings end a session within the seconds that an agent and its result may
        take."""

    def check_run(self, run: RolloutConfig) -> None:
        self.check_session_lifetime(run.timeouts.session_s)
        if self.agent_protocol == "rollout":
            return
        where = f"runtime.agent_protocol={self.agent_protocol}: such agents"
        if self.payload_in_file:
            raise ValueError(
                f"{where} are HTTP servers, and runtime.kind={self.kind} passes the payload in a file: use the kind "
                "agentcore or http"
            )
        if self.agent_protocol == "verl-4216" and not run.gateway.key_in_path:
            raise ValueError(f"{where} send no API key of ours: set gateway.key_in_path=true")
        if run.storage.presigned:
            to_s3 = self.agent_protocol in ("agentcore-rl-toolkit", "verl-4216")
            writes = "to S3 with credentials" if to_s3 else "nothing to S3"
            raise ValueError(f"{where} write {writes}: set storage.presigned=false")
        if self.agent_protocol == "verl-4216" and not run.queue.enabled:
            raise ValueError(f"{where} fail if they cannot announce a result: set queue.enabled=true")

    def for_run(self, run_dir: Path, aws_environment: Mapping[str, str]) -> Self:
        """Return the settings with unset values filled in from other sections: the run's folder, and environment
        variables that name the endpoints of S3 and SQS if not AWS."""
        return self


class AgentCoreConfig(RuntimeConfig):
    """AWS Bedrock AgentCore Runtime: an existing runtime, by its `arn`, or one created from an `image`. Quotas differ
    between accounts: set the rates below yours."""

    implementation: ClassVar[str] = "rollout_backend.agents.runtimes.agentcore.runtime.AgentCoreRuntime"

    kind: Literal["agentcore"] = "agentcore"
    arn: Annotated[str, matching(_ARN, _ARN_FORM)] | None = None
    """ARN of an existing runtime, which is used unchanged. Set either this or `image`."""
    image: Annotated[str, matching(_IMAGE, _IMAGE_FORM)] | None = None
    """The agent's container image in ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG, or
    public.ecr.aws/REPOSITORY:TAG with `image_region`. The backend creates a runtime from it before the run, or
    updates the existing one if these settings differ. The runtime stays after the run and costs nothing while it has
    no session. Use a new tag for a new image; otherwise the change is not detected."""
    role: Annotated[str, matching(_ROLE, "the ARN of a role: arn:aws:iam::ACCOUNT:role/NAME")] | None = None
    """ARN of the agents' execution role. Required with `image`."""
    name: Annotated[str, matching(_NAME, _NAME_FORM)] | None = None
    """Name of the runtime created from `image`. Default: `rollout_` and the last part of the repository's name, and a
    digest of the whole name if that has a `/`, `-` or `.`, or is long. Concurrent runs that differ in image, role,
    network, environment or lifetimes need different names."""
    subnets: tuple[str, ...] = ()
    """Private subnets of the agents, with `image`. Default: the public network."""
    security_groups: tuple[str, ...] = ()
    """Security groups of the agents. Required with `subnets`, and only with them."""
    environment: dict[str, str] = Field(default={})
    """Environment variables of the container, with `image`. Never put secrets here: they can be read back."""
    idle_timeout_s: int = Field(default=120, ge=60, le=_INSTANCE_S)
    """Idle timeout of a session, with `image`. A session whose agent is working is not idle."""
    max_lifetime_s: int = Field(default=_MICROVM_S, ge=60, le=_INSTANCE_S)
    """Maximum lifetime of a session, with `image`: 8 hours, or 14 days with `capacity_provider`."""
    platform_version: Annotated[str, matching(r"\S{1,128}", "a platform's version, such as V2")] | None = None
    """AgentCore's platform, `V1` or `V2`, with `image`. Default: V2 with `warmup_path`; otherwise an existing runtime
    keeps its own, and a new one gets V1. `V2` moves a runtime from V1; none moves back. See
    [deploy.md](deploy.md#sessions-that-start-from-a-snapshot) for V2."""
    warmup_path: Annotated[str, matching(r"/[A-Za-z0-9._~/-]{0,31}", "a path of at most 32 characters")] | None = None
    """Path of the agent's container to which AgentCore sends a POST before it takes the snapshot, with `image` on V2.
    It must answer 2xx within 120 s."""
    min_memory_mib: int | None = Field(default=None, ge=1)
    """Minimum memory of a session in MiB, with `image`. Default: AgentCore's."""
    capacity_provider: Annotated[str, matching(_PROVIDER, "the ARN of a capacity provider")] | None = None
    """ARN of a capacity provider, with `image`: sessions run on its EC2 instances (x86, GPU), for up to 14 days."""
    image_region: Annotated[str, matching("[a-z]{2,}(-[a-z0-9]+)+", "a region, such as us-east-1")] | None = None
    """Region of the runtime, for an image in ECR Public, whose name contains no region."""
    task_image: Annotated[str, matching(_TASK_IMAGE, "an image's name with {task} in it")] | None = None
    """Image of each Harbor task whose task.toml names none in ECR, such as
    ACCOUNT.dkr.ecr.REGION.amazonaws.com/tasks:{task}, with `image`. `{task}` is the name of the task's folder, in
    lower case. The run creates a runtime for each image: see
    [harbor.md](harbor.md#run-each-task-in-its-own-image-on-agentcore). Without it, tasks run in `image`."""
    ready_timeout_s: Seconds = 600.0
    """Timeout until a runtime created from `image` is ready and its endpoint serves it. On V2, AgentCore takes
    minutes to make the snapshot."""
    read_timeout_s: Seconds = 150.0
    """Timeout of an invoke. AgentCore gives a container 120 s to start, and reports one that has not."""
    qualifier: str = "DEFAULT"
    """Endpoint of the runtime. DEFAULT serves the newest version; a runtime created from `image` has no other."""
    invoke_per_s: Rate = 24.0
    """Maximum sessions started per second. Default: below the quota of 25 per second and account. If your account
    still has the quota of 400 containers per minute, which was the default until August 2026, set 6.5. If the runtime
    refuses invokes (429, 402, 5xx), the rate adapts to what it grants, and the report shows that rate. Refused
    invokes are retried until the step's deadline."""
    max_sessions: int = Field(default=5000, ge=1)
    """Maximum open sessions. Default: the quota of us-east-1 and us-west-2; 2,500 in other regions."""
    endpoint_url: HttpUrl | None = None
    """Endpoint of data plane and control plane if not AWS, such as the local emulator."""
    session_logs: Path | None = None
    """Folder of the sessions' logs, SESSION.log, at the local emulator. Default: the logs are in CloudWatch."""

    @model_validator(mode="before")
    @classmethod
    def _fit_sessions_to_region(cls, values: Any) -> Any:
        """Set `max_sessions`, so that a run's stored settings contain the limit that it had."""
        place = (
            isinstance(values, Mapping) and f"{values.get('arn') or values.get('image')} {values.get('image_region')}"
        )
        if not place or "max_sessions" in values or any(region in place for region in LARGE_REGIONS):
            return values
        return {**values, "max_sessions": SMALL_REGION_SESSIONS}

    @field_validator("subnets", "security_groups")
    @classmethod
    def _are_ids(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kind = "subnet" if info.field_name == "subnets" else "sg"
        if len(values) > 16:
            raise ValueError(f"has {len(values)} entries; AgentCore accepts at most 16")
        for value in values:
            check_matches(value, rf"{kind}-[0-9a-zA-Z]{{8,17}}", f"an id like {kind}-0123456789abcdef0")
        return values

    @field_validator("environment")
    @classmethod
    def _fits(cls, values: dict[str, str]) -> dict[str, str]:
        if len(values) > 50 or any(not 1 <= len(k) <= 100 or len(v) > 5000 for k, v in values.items()):
            raise ValueError("AgentCore accepts at most 50 variables, names of 100 and values of 5,000 characters")
        return values

    @model_validator(mode="after")
    def _arn_or_image(self) -> Self:
        if (self.arn is None) == (self.image is None):
            raise ValueError(
                "set arn to use an existing runtime, or image to create one; exactly one of the two is needed"
            )
        if self.image is None:
            # Values, not `model_fields_set`: the settings that a run stores hold every default.
            fields = type(self).model_fields
            stray = sorted(name for name in _IMAGE_ONLY if getattr(self, name) != fields[name].default)
            if stray:
                raise ValueError(f"{', '.join(stray)} belong to image; a runtime given by its arn is used unchanged")
            return self
        if self.role is None:
            raise ValueError("image needs role, the ARN of the agents' execution role")
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups belong together: set both, or neither")
        if self.qualifier != "DEFAULT":
            raise ValueError("a runtime created from image has the endpoint DEFAULT only: leave qualifier out")
        if self.idle_timeout_s > self.max_lifetime_s:
            raise ValueError("idle_timeout_s must not be above max_lifetime_s")
        if self.max_lifetime_s > _MICROVM_S and self.capacity_provider is None:
            raise ValueError(f"max_lifetime_s above {_MICROVM_S} (8 hours) needs capacity_provider")
        if self.warmup_path is not None and (self.platform_version == "V1" or self.capacity_provider):
            raise ValueError("warmup_path needs platform V2, without capacity_provider: others have no hooks")
        if self.image.startswith(_PUBLIC) == (self.image_region is None):
            raise ValueError(
                f"image_region belongs to an image of {_PUBLIC}: set it with such an image, and only then"
            )
        return self

    @property
    def region(self) -> str:
        """Return the region in the ARN or in the image name, or `image_region`."""
        if self.image_region is not None:
            return self.image_region
        return (self.arn.split(":") if self.arn else str(self.image).split("."))[3]

    @property
    def named_platform(self) -> str | None:
        """Return the platform that the settings name; None keeps that of an existing runtime."""
        return self.platform_version or ("V2" if self.warmup_path is not None else None)

    @property
    def runtime_name(self) -> str:
        """Return the name of the runtime created from `image`."""
        if self.name is not None:
            return self.name
        repository = re.split("[:@]", str(self.image).partition("/")[2])[0]
        name = f"rollout_{repository.rpartition('/')[2]}"
        return derived_name(name, "A-Za-z0-9_", 48, separator="_", of=repository if "/" in repository else None)

    @staticmethod
    def can_pull(image: str) -> bool:
        """Return whether AgentCore pulls this image: it is in ECR."""
        return re.fullmatch(_IMAGE, image) is not None

    @property
    def agents_host(self) -> str:
        return urlsplit(self.endpoint_url or "").hostname or "AgentCore"

    def check_session_lifetime(self, needed_s: float) -> None:
        if self.image is not None and self.max_lifetime_s < needed_s:
            raise ValueError(
                f"runtime.max_lifetime_s ({self.max_lifetime_s}) ends sessions before timeouts.agent_s + "
                f"timeouts.publish_grace_s ({needed_s:g}): raise it, or lower them"
            )


class HttpConfig(RuntimeConfig):
    """Any server with the same container contract: a Kubernetes service, a container, a process."""

    implementation: ClassVar[str] = "rollout_backend.agents.runtimes.http.HttpRuntime"

    kind: Literal["http"] = "http"
    url: HttpUrl
    """Root URL of the server; `/invocations` and `/stop` are appended. With several replicas, route requests with the
    same session header to the same replica. Otherwise a stop may not reach its agent, which then runs until its next
    model call fails."""
    token: SecretStr | None = Field(default=None, min_length=16)
    """Secret that is sent to `/invocations` and `/stop`, as `Authorization: Bearer TOKEN`. A server with
    agent_wrapper requires the value of its $ROLLOUT_AGENT_TOKEN. Set it in the environment, as
    ROLLOUT__RUNTIME__TOKEN."""
    can_stop: bool = True
    """False: the server cannot stop a session. Its agents lose access to the model and run until they end."""

    @property
    def agents_host(self) -> str | None:
        return urlsplit(self.url).hostname


class TaskImageConfig(RuntimeConfig):
    """Settings of a runtime that runs a Harbor task in the task's own image, with the agent's files in /agent, and
    its verifier in a second container of that image. The implementation is a `VerifierRuntime`."""

    max_tests_bytes: ClassVar[int]
    """Maximum size of a task's compressed tests, which a verifier is started with."""

    command: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Command of the container: text, or a list. Default: the image's. Required for Harbor tasks, such as
    `[/agent/bin/python, -I, -m, agent_wrapper.exec, ...]`."""
    task_image: Annotated[str, matching(_TASK_IMAGE, "an image's name with {task} in it")] | None = None
    """Image of each Harbor task whose task.toml names none, such as `registry.example.com/tasks/{task}:1`. `{task}`
    is the name of the task's folder, in lower case."""
    start_timeout_s: Seconds = 600.0
    """Timeout from an invoke until its container runs: scheduling, a new node, pulling the image. After it, the
    rollout gets another attempt. Must be below timeouts.agent_s + timeouts.publish_grace_s."""


class KubernetesConfig(TaskImageConfig):
    """Kubernetes: one Job per attempt, in a namespace of any cluster. See kubernetes.md."""

    implementation: ClassVar[str] = "rollout_backend.agents.runtimes.kubernetes.runtime.KubernetesRuntime"
    payload_in_file: ClassVar[bool] = True
    # A Secret holds 1 MiB, and the rest of it is the verifier's order.
    max_tests_bytes: ClassVar[int] = 1_000_000

    kind: Literal["kubernetes"] = "kubernetes"
    image: str = Field(min_length=1)
    """The agent's container image. Its command must be an app that is served by `RolloutApp.run`. For Harbor tasks,
    which run in their own images, its folder /agent is copied into each container: see [harbor.md](harbor.md)."""
    namespace: Annotated[str, matching(_DNS_LABEL, "a name of lower-case letters, digits and -")] = "rollouts"
    """Namespace of the Jobs."""
    kubeconfig: Path | None = None
    """File with the cluster and the credentials. Default: the service account of this pod, or $KUBECONFIG, or
    ~/.kube/config."""
    context: str | None = None
    """Context of the kubeconfig. Default: its current context."""
    requests: dict[str, str] = Field(default={})
    """Resources that the scheduler reserves for an agent, such as {cpu: 500m, memory: 1Gi}."""
    limits: dict[str, str] = Field(default={})
    """Resources that an agent may use. A container that uses more memory is killed, and its rollout gets another
    attempt."""
    node_selector: dict[str, str] = Field(default={})
    """Labels of the nodes that agents may run on."""
    tolerations: tuple[dict[str, str | int], ...] = ()
    """Taints of nodes that agents tolerate, such as {key: spot, operator: Exists}."""
    service_account: str | None = None
    """Service account of the agents, which can give them a cloud role. Its token is not mounted."""
    pod_security: Literal["baseline", "restricted"] = "baseline"
    """Pod Security Standard that the pods meet. `restricted` drops all capabilities and refuses images that run as
    root: every image, including those of Harbor tasks, must set a numeric user."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets in the namespace for pulling the image."""
    environment: dict[str, str] = Field(default={})
    """Environment variables of the container. Never put secrets here: anyone who can read the Jobs can read them."""
    keep_finished_s: int = Field(default=600, ge=0)
    """Time after which a Job that has finished is deleted, with its pod and its log. A Job that is stopped is deleted
    at once."""
    invoke_per_s: Rate = 10.0
    """Maximum Jobs created per second. Default: half of the 20 calls per second of the cluster's controllers. If the
    API server refuses invokes (429, 5xx, an exceeded quota), the rate adapts to what it grants, and the report shows
    that rate. Refused invokes are retried until the step's deadline."""
    read_timeout_s: Seconds = 30.0
    """Timeout of one call to the API server."""

    @field_validator("requests", "limits")
    @classmethod
    def _are_quantities(cls, values: dict[str, str]) -> dict[str, str]:
        for value in values.values():
            check_matches(value, r"\d+(\.\d+)?([eE]\d+|[numkMGTPE]|[KMGTPE]i)?", "a quantity such as 500m or 2Gi")
        return values

    @field_validator("tolerations")
    @classmethod
    def _are_tolerations(cls, values: tuple[dict[str, str | int], ...]) -> tuple[dict[str, str | int], ...]:
        for value in values:
            stray = sorted(value.keys() - _TOLERATION)
            if stray:
                raise ValueError(f"{', '.join(stray)}: a toleration has {', '.join(sorted(_TOLERATION))}")
        return values

    @field_validator("environment")
    @classmethod
    def _leaves_the_payload(cls, values: dict[str, str]) -> dict[str, str]:
        if PAYLOAD_VARIABLE in values:
            raise ValueError(f"{PAYLOAD_VARIABLE} is set by the backend: remove it")
        return values

    @property
    def agents_host(self) -> str:
        return "Kubernetes"

    def check_session_lifetime(self, needed_s: float) -> None:
        if self.start_timeout_s >= needed_s:
            raise ValueError(
                f"runtime.start_timeout_s ({self.start_timeout_s:g}) is not below timeouts.agent_s + "
                f"timeouts.publish_grace_s ({needed_s:g}), after which a rollout without a result times out: lower "
                "the one, or raise the others"
            )


class ProcessConfig(RuntimeConfig):
    """Agents as processes on this machine, one per session. They run as your user, with your files, network and
    environment: run only agents that you trust."""

    implementation: ClassVar[str] = "rollout_backend.agents.runtimes.process.runtime.ProcessRuntime"
    payload_in_file: ClassVar[bool] = True

    kind: Literal["process"] = "process"
    app: str | None = None
    """The agent's app, MODULE:NAME, such as `agent:app`. Set either this or `command`."""
    command: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Command that runs the payload in the file $ROLLOUT_PAYLOAD_FILE and exits: text, or a list."""
    python: Path | None = None
    """Python interpreter for `app`. Default: the backend's."""
    working_dir: Path = Field(default=Path(), validate_default=True)
    """Working directory of every process. `app` is imported from there."""
    environment: dict[str, str] = Field(default={})
    """Environment variables, in addition to those of the backend except ROLLOUT__*. Never put secrets here: the
    settings are stored in the run's folder. AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL_SQS have the
    endpoints of `aws`."""
    keep_home: bool = False
    """Let all sessions share your HOME and XDG_* folders. By default each session has its own, which are removed at
    its end, because command-line agents keep the model's endpoint and key in their settings. ~/.aws is linked into
    it, and Python finds the packages of your account."""
    memory_bytes: int | None = Field(default=None, ge=64 * 1024 * 1024)
    """Maximum resident memory of all processes of a session together, on Linux. Above it, the session is killed and
    its rollout is retried. It is measured twice per second. Null: no limit."""
    nice: int = Field(default=0, ge=0, le=19)
    """Niceness of the processes; 19 is the lowest priority."""
    grace_s: Seconds = 5.0
    """Time from SIGTERM to SIGKILL when a session is stopped."""
    max_lifetime_s: Seconds = 28_800.0
    """Maximum lifetime of a session, enforced even if the backend has died."""
    session_logs: Path | None = None
    """Folder of the sessions' logs, SESSION.log. Default: logs/sessions in the run's folder."""
    invoke_per_s: Rate = 10.0
    """Maximum processes started per second."""
    max_sessions: int = Field(default=16, ge=1)
    """Maximum concurrent sessions."""

    @field_validator("app")
    @classmethod
    def _module_and_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError("must be MODULE:NAME, such as agent:app for the app of agent.py")
        return value

    @field_validator("working_dir")
    @classmethod
    def _is_absolute(cls, value: Path) -> Path:
        # A resumed run may start in another directory.
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _app_or_command(self) -> Self:
        if (self.app is None) == (not self.command):
            raise ValueError("set app to a Python app, or command to any program; exactly one of the two is needed")
        if self.python is not None and self.app is None:
            raise ValueError("python belongs to app; name the interpreter in command")
        return self

    @property
    def argv(self) -> list[str]:
        """Return the command of a session."""
        if self.app is None:
            return [*self.command]
        module, _, name = self.app.partition(":")
        return [str(self.python or sys.executable), "-c", f"from {module} import {name} as app; app.run()"]

    @property
    def stop_limit_s(self) -> float:
        return super().stop_limit_s + self.grace_s

    @property
    def agents_host(self) -> str | None:
        return "localhost"

    def check_session_lifetime(self, needed_s: float) -> None:
        if self.max_lifetime_s < needed_s:
            raise ValueError(
                f"runtime.max_lifetime_s ({self.max_lifetime_s:g}) ends sessions before timeouts.agent_s + "
                f"timeouts.publish_grace_s ({needed_s:g}): raise it, or lower them"
            )

    def for_run(self, run_dir: Path, aws_environment: Mapping[str, str]) -> Self:
        logs = self.session_logs or run_dir.absolute() / "logs" / "sessions"
        return self.model_copy(update={"environment": {**aws_environment, **self.environment}, "session_logs": logs})


class RayConfig(ProcessConfig):
    """Agents on the machines of a Ray cluster, one process per session, with the settings of `process`. This package
    and `working_dir` must be in the same place on each machine."""

    implementation: ClassVar[str] = "rollout_backend.agents.runtimes.ray.RayRuntime"

    kind: Literal["ray"] = "ray"  # type: ignore[assignment]
    address: str = "auto"
    """Address of the Ray cluster, HOST:PORT. Default: the cluster of this machine, or of the trainer."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that a session reserves in Ray."""
    resources: dict[str, float] = Field(default={})
    """Ray resources of a session, such as `{"agents": 1}` on machines started with `--resources '{"agents": 64}'`."""
    node_labels: dict[str, str] = Field(default={})
    """Labels that a session's machine must have, as Ray's label selector: `{"pool": "agents"}` on machines started
    with `--labels pool=agents`."""
    runtime_env: dict[str, JsonValue] = Field(default={})
    """Ray's runtime environment of the sessions: `env_vars`, and packages under `pip`. Others are refused."""
    start_timeout_s: Seconds = 120.0
    """Time for Ray to start a session. A start that takes longer is retried."""
    max_sessions: int = Field(default=64, ge=1)
    """Maximum concurrent sessions."""

    @field_validator("runtime_env")
    @classmethod
    def _supported(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if others := sorted(value.keys() - _RAY_ENVIRONMENT):
            raise ValueError(
                f"{', '.join(others)}: agents on Ray take {' and '.join(sorted(_RAY_ENVIRONMENT))}. An agent in an "
                "image runs on kubernetes or agentcore"
            )
        return value

    @property
    def invoke_limit_s(self) -> float:
        return super().invoke_limit_s + self.start_timeout_s

    @property
    def stop_limit_s(self) -> float:
        # A session is stopped once it has started.
        return super().stop_limit_s + self.start_timeout_s

    @property
    def agents_host(self) -> str | None:
        return None


RUNTIME_KINDS: Mapping[str, type[RuntimeConfig]] = {
    "agentcore": AgentCoreConfig,
    "http": HttpConfig,
    "kubernetes": KubernetesConfig,
    "process": ProcessConfig,
    "ray": RayConfig,
}


def _config_class(kind: object) -> type[RuntimeConfig]:
    """Return the class of a kind. Raises ValueError."""
    known = RUNTIME_KINDS.get(str(kind))
    if known is not None:
        return known
    choices = kind_choices(RUNTIME_KINDS, "a RuntimeConfig subclass")
    if kind is None:
        raise ValueError(f"kind is missing: it is one of {choices}")
    found = import_kind(kind, choices)
    if not (isinstance(found, type) and issubclass(found, RuntimeConfig)):
        # pydantic reports a ValueError, and not a TypeError.
        raise ValueError(f"kind {kind!r} is not a subclass of RuntimeConfig")  # noqa: TRY004
    return found


def _parse_runtime(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return _config_class(value.get("kind")).model_validate(value)


AnyRuntimeConfig = Annotated[SerializeAsAny[RuntimeConfig], BeforeValidator(_parse_runtime)]
"""The type of the `runtime` section: an instance of the class that its `kind` names."""
