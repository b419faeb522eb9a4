"""A runtime as the settings want it against the runtime as it is: what is to be done. Pure: it calls nobody.

What must always hold:

- a runtime that is as the settings want it is left alone;
- one that somebody else made is never changed, only used as it is: what this backend makes carries MARK as its
  description;
- nothing is done to a runtime in transition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from rollout_backend.config import AgentCoreConfig

MARK = "made by rollout-backend"


class Action(Enum):
    """What is to be done. READY: nothing. REPLACE: delete it first, for it never worked. WAIT: look again later.
    LEAVE: it would have to be changed, and is not ours."""

    READY = "ready"
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    WAIT = "wait"
    LEAVE = "leave"


@dataclass(frozen=True)
class Plan:
    action: Action
    differs: tuple[str, ...] = ()  # the settings at variance, by the names that a user knows


@dataclass(frozen=True)
class RuntimeSpec:
    """What a runtime made from an image is to be."""

    name: str
    image: str
    role: str
    subnets: frozenset[str]
    security_groups: frozenset[str]
    environment: Mapping[str, str]
    idle_timeout_s: int
    max_lifetime_s: int

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
        )

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Self:
        """What GetAgentRuntime describes. What it does not say, such as an image in an older kind of runtime, is
        empty, and so differs."""
        network = described.get("networkConfiguration", {}).get("networkModeConfig") or {}
        lifetimes = described.get("lifecycleConfiguration") or {}
        container = described.get("agentRuntimeArtifact", {}).get("containerConfiguration") or {}
        return cls(
            name=described["agentRuntimeName"],
            image=container.get("containerUri", ""),
            role=described.get("roleArn", ""),
            subnets=frozenset(network.get("subnets", ())),
            security_groups=frozenset(network.get("securityGroups", ())),
            environment=described.get("environmentVariables") or {},
            idle_timeout_s=lifetimes.get("idleRuntimeSessionTimeout", 0),
            max_lifetime_s=lifetimes.get("maxLifetime", 0),
        )

    def definition(self) -> dict[str, Any]:
        """The arguments that CreateAgentRuntime and UpdateAgentRuntime share. An update makes a version from what it
        is given alone, so this is always all of it."""
        network: dict[str, Any] = {"networkMode": "PUBLIC"}
        if self.subnets:
            own = {"subnets": sorted(self.subnets), "securityGroups": sorted(self.security_groups)}
            network = {"networkMode": "VPC", "networkModeConfig": own}
        return {
            "description": MARK,
            "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": self.image}},
            "roleArn": self.role,
            "networkConfiguration": network,
            "protocolConfiguration": {"serverProtocol": "HTTP"},
            "lifecycleConfiguration": {
                "idleRuntimeSessionTimeout": self.idle_timeout_s,
                "maxLifetime": self.max_lifetime_s,
            },
            "environmentVariables": dict(self.environment),
        }


def plan(wanted: RuntimeSpec, described: Mapping[str, Any] | None) -> Plan:
    """`described` is GetAgentRuntime's answer, or None if there is no runtime of that name."""
    if described is None:
        return Plan(Action.CREATE)
    status, ours = described["status"], described.get("description") == MARK
    if status in ("CREATING", "UPDATING", "DELETING"):
        return Plan(Action.WAIT)
    differs = _differences(wanted, described)
    if status == "CREATE_FAILED":
        return Plan(Action.REPLACE if ours else Action.LEAVE, differs)
    if status == "UPDATE_FAILED" or differs:
        return Plan(Action.UPDATE if ours else Action.LEAVE, differs)
    return Plan(Action.READY)


def _differences(wanted: RuntimeSpec, described: Mapping[str, Any]) -> tuple[str, ...]:
    actual = RuntimeSpec.read(described)
    differs = [name for name in vars(wanted) if getattr(wanted, name) != getattr(actual, name)]
    protocol = described.get("protocolConfiguration") or {}
    if protocol.get("serverProtocol", "HTTP") != "HTTP":
        differs.append("protocol")
    # AgentCore refuses to invoke a runtime that does not require it.
    if not (described.get("metadataConfiguration") or {}).get("requireMMDSV2", False):
        differs.append("requireMMDSV2")
    return tuple(differs)
