"""Compare a runtime with the settings, and decide which change it needs. Pure.

Invariants:

- a runtime that matches the settings is not changed;
- a runtime that this backend did not create is never changed (MARK in the description identifies the backend's own);
- a runtime in transition is not changed;
- an update keeps all fields that the settings do not cover;
- each definition names its platform, because AgentCore's default depends on region and date. An update moves a
  runtime to another platform only if the settings name it, and never from V2 to V1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from rollout_backend.config import AgentCoreConfig

MARK = "made by rollout-backend"
# AgentCore's limits of an agent that is deployed as code
MAX_ZIP_BYTES, MAX_UNPACKED_BYTES = 250_000_000, 750_000_000
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
DEFINITION = (
    "description",
    "agentRuntimeArtifact",
    "roleArn",
    "networkConfiguration",
    "protocolConfiguration",
    "lifecycleConfiguration",
    "environmentVariables",
    "hooksConfiguration",
    "resourceConfigurations",
    "capacityProviderConfiguration",
    "platformVersion",
    "authorizerConfiguration",
    "requestHeaderConfiguration",
    "filesystemConfigurations",
    "allowedPorts",
)
"""Fields that CreateAgentRuntime and UpdateAgentRuntime share."""
# Fields that no setting covers.
_KEPT = DEFINITION[-4:]
# The platform of a new runtime, and of one that AgentCore describes without a platform.
_PLATFORM = "V1"
# The tag of everything that this backend creates. Its value names the purpose.
TAG = "rollout-backend"


class Action(Enum):
    """The change that a runtime needs.

    READY: none. REPLACE: delete it, because it never worked, and create it again. WAIT: poll again later. LEAVE:
    none, because this backend did not create it, although it differs from the settings.
    """

    READY = "ready"
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    WAIT = "wait"
    LEAVE = "leave"


@dataclass(frozen=True)
class Plan:
    action: Action
    differs: tuple[str, ...] = ()
    """Names of the settings that differ."""


@dataclass(frozen=True)
class CodeArtifact:
    """A zip in S3 with an agent's code and packages, which AgentCore runs without a container image."""

    bucket: str
    key: str
    python: str
    """Python version, such as `3.12`."""
    entry_point: tuple[str, ...] = ("agent.py",)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Self:
        """Parse a `codeConfiguration`."""
        place = described["code"]["s3"]
        python = described["runtime"].removeprefix("PYTHON_").replace("_", ".")
        return cls(place["bucket"], place["prefix"], python, tuple(described["entryPoint"]))

    def definition(self) -> dict[str, Any]:
        return {
            "code": {"s3": {"bucket": self.bucket, "prefix": self.key}},
            "runtime": f"PYTHON_{self.python.replace('.', '_')}",
            "entryPoint": list(self.entry_point),
        }


@dataclass(frozen=True)
class RuntimeSpec:
    """Properties of a runtime that is created from an image or from code."""

    name: str
    image: str | CodeArtifact
    role: str
    subnets: frozenset[str]
    security_groups: frozenset[str]
    environment: Mapping[str, str]
    idle_timeout_s: int
    max_lifetime_s: int
    platform_version: str | None = None
    """None keeps the platform of an existing runtime. A new one gets V1."""
    warmup_path: str | None = None
    min_memory_mib: int | None = None
    capacity_provider: str | None = None

    @classmethod
    def of(cls, config: AgentCoreConfig) -> Self:
        assert config.image is not None
        assert config.role is not None, "checked by the settings"
        return cls(
            name=config.runtime_name,
            image=config.image,
            role=config.role,
            subnets=frozenset(config.subnets),
            security_groups=frozenset(config.security_groups),
            environment=config.environment,
            idle_timeout_s=config.idle_timeout_s,
            max_lifetime_s=config.max_lifetime_s,
            platform_version=config.named_platform,
            warmup_path=config.warmup_path,
            min_memory_mib=config.min_memory_mib,
            capacity_provider=config.capacity_provider,
        )

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Self:
        """Parse GetAgentRuntime's response. A missing field becomes empty, so it differs from the settings."""
        network = described.get("networkConfiguration", {}).get("networkModeConfig") or {}
        lifetimes = described.get("lifecycleConfiguration") or {}
        artifact = described.get("agentRuntimeArtifact", {})
        code = artifact.get("codeConfiguration")
        container = artifact.get("containerConfiguration") or {}
        [memory] = described.get("resourceConfigurations") or [{}]
        warmup = (described.get("hooksConfiguration") or {}).get("build", {}).get("warmup", {}).get("action", {})
        return cls(
            name=described.get("agentRuntimeName", ""),
            image=CodeArtifact.read(code) if code else container.get("containerUri", ""),
            role=described.get("roleArn", ""),
            subnets=frozenset(network.get("subnets", ())),
            security_groups=frozenset(network.get("securityGroups", ())),
            environment=described.get("environmentVariables") or {},
            idle_timeout_s=lifetimes.get("idleRuntimeSessionTimeout", 0),
            max_lifetime_s=lifetimes.get("maxLifetime", 0),
            platform_version=described.get("platformVersion", _PLATFORM),
            warmup_path=warmup.get("httpPost", {}).get("path"),
            min_memory_mib=memory.get("minimumMemoryInMiB"),
            capacity_provider=(described.get("capacityProviderConfiguration") or {}).get("capacityProviderArn"),
        )

    def definition(self) -> dict[str, Any]:
        """Return the arguments of CreateAgentRuntime, without name and tags."""
        network: dict[str, Any] = {"networkMode": "PUBLIC"}
        if self.subnets:
            own = {"subnets": sorted(self.subnets), "securityGroups": sorted(self.security_groups)}
            network = {"networkMode": "VPC", "networkModeConfig": own}
        artifact = (
            {"codeConfiguration": self.image.definition()}
            if isinstance(self.image, CodeArtifact)
            else {"containerConfiguration": {"containerUri": self.image}}
        )
        newer: dict[str, Any] = {}
        if self.platform_version is not None or self.capacity_provider is None:
            newer["platformVersion"] = self.platform_version or _PLATFORM
        if self.warmup_path is not None:
            newer["hooksConfiguration"] = {"build": {"warmup": {"action": {"httpPost": {"path": self.warmup_path}}}}}
        if self.min_memory_mib is not None:
            newer["resourceConfigurations"] = [{"minimumMemoryInMiB": self.min_memory_mib}]
        if self.capacity_provider is not None:
            newer["capacityProviderConfiguration"] = {"capacityProviderArn": self.capacity_provider}
        return {
            "description": MARK,
            "agentRuntimeArtifact": artifact,
            "roleArn": self.role,
            "networkConfiguration": network,
            "protocolConfiguration": {"serverProtocol": "HTTP"},
            "lifecycleConfiguration": {
                "idleRuntimeSessionTimeout": self.idle_timeout_s,
                "maxLifetime": self.max_lifetime_s,
            },
            "environmentVariables": dict(self.environment),
            **newer,
        }

    def update_of(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of UpdateAgentRuntime, all of them, because it replaces the whole definition."""
        kept = {name: described[name] for name in _KEPT if name in described}
        if self.platform_version is None and "platformVersion" in described:
            kept["platformVersion"] = described["platformVersion"]
        return {**self.definition(), **kept, "metadataConfiguration": {"requireMMDSV2": True}}


def plan(wanted: RuntimeSpec, described: Mapping[str, Any]) -> Plan:
    """Decide what to do. `described` is GetAgentRuntime's response; empty if no runtime has that name."""
    if not described:
        return Plan(Action.CREATE)
    status, ours = described["status"], described.get("description") == MARK
    differs = _differences(wanted, described)
    if status == "READY" and not differs:
        return Plan(Action.READY)
    if status != "READY" and not status.endswith("_FAILED"):
        # The status is CREATING, UPDATING, DELETING, or one that AgentCore adds later.
        return Plan(Action.WAIT)
    if "platform_version" in differs and wanted.platform_version == _PLATFORM:
        return Plan(Action.LEAVE, differs)
    remedy = Action.REPLACE if status in ("CREATE_FAILED", "DELETE_FAILED") else Action.UPDATE
    return Plan(remedy if ours else Action.LEAVE, differs)


def _differences(wanted: RuntimeSpec, described: Mapping[str, Any]) -> tuple[str, ...]:
    actual = RuntimeSpec.read(described)
    left_to_agentcore = {name for name in ("platform_version", "min_memory_mib") if getattr(wanted, name) is None}
    names = [name for name in vars(wanted) if name not in left_to_agentcore]
    differs = [name for name in names if getattr(wanted, name) != getattr(actual, name)]
    protocol = described.get("protocolConfiguration") or {}
    if protocol.get("serverProtocol", "HTTP") != "HTTP":
        differs.append("protocol")
    # AgentCore refuses to invoke a runtime that does not require MMDSv2.
    if not (described.get("metadataConfiguration") or {}).get("requireMMDSV2", False):
        differs.append("requireMMDSV2")
    return tuple(differs)
