"""List the permissions that a run on AgentCore needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_backend.aws import Permission
from rollout_backend.config import AgentCoreConfig

_SERVICE = "bedrock-agentcore"


def needed_permissions(config: AgentCoreConfig) -> Sequence[Permission]:
    """Return the permissions for all calls to the runtime that these settings name or describe."""
    arn = config.arn or _arn_to_be(config)
    endpoint = f"{arn}/runtime-endpoint/{config.qualifier}"
    own = config.image is not None  # with an image, the runtime is described before it is changed
    found = [
        Permission(f"{_SERVICE}:InvokeAgentRuntime", (arn, endpoint)),
        Permission(f"{_SERVICE}:StopRuntimeSession", (arn, endpoint)),
        Permission(f"{_SERVICE}:GetAgentRuntime", (arn,), needed=own),
        Permission(f"{_SERVICE}:GetAgentRuntimeEndpoint", (arn, endpoint), needed=own),
    ]
    found.append(Permission("servicequotas:ListServiceQuotas", ("*",), needed=False))
    if config.role is not None:
        passed = (("iam:PassedToService", f"{_SERVICE}.amazonaws.com"),)
        found += [
            Permission(f"{_SERVICE}:ListAgentRuntimes", ("*",)),
            Permission(f"{_SERVICE}:CreateAgentRuntime", ("*",)),
            Permission(f"{_SERVICE}:TagResource", (arn,)),
            Permission(f"{_SERVICE}:ListTagsForResource", (arn,), needed=own),
            Permission(f"{_SERVICE}:UntagResource", (arn,), needed=own),
            Permission(f"{_SERVICE}:UpdateAgentRuntime", (arn,)),
            Permission(f"{_SERVICE}:DeleteAgentRuntime", (arn,)),
            Permission("iam:PassRole", (config.role,), passed),
        ]
    return found


def _arn_to_be(config: AgentCoreConfig) -> str:
    """Return the ARN of the runtime that will be created from an image, with a placeholder for its unknown id."""
    _, partition, _, _, account, _ = str(config.role).split(":", 5)
    return f"arn:{partition}:{_SERVICE}:{config.region}:{account}:runtime/{config.runtime_name}-0000000000"
