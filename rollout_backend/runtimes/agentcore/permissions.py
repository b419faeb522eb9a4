"""List the permissions that a run on AgentCore needs. Pure."""

from __future__ import annotations

import re
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
    if config.image is not None and (repository := _repository(config)) is not None:
        found.append(Permission("ecr:BatchGetImage", (repository,), needed=False))
        found.append(Permission("ecr:GetDownloadUrlForLayer", (repository,), needed=False))
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


def _repository(config: AgentCoreConfig) -> str | None:
    """Return the ARN of the image's repository; None if it is public."""
    registry, _, image = str(config.image).partition("/")
    account, *_, region = registry.split(".")[:4]
    if not account.isdigit():
        return None
    partition = str(config.role).split(":")[1]
    return f"arn:{partition}:ecr:{region}:{account}:repository/{re.split('[:@]', image)[0]}"


def _arn_to_be(config: AgentCoreConfig) -> str:
    """Return the ARN of the runtime that will be created from an image, with a placeholder for its unknown id."""
    _, partition, _, _, account, _ = str(config.role).split(":", 5)
    return f"arn:{partition}:{_SERVICE}:{config.region}:{account}:runtime/{config.runtime_name}-0000000000"
