"""List the permissions that a run on AgentCore needs, and compare its settings with the account's quotas.

The numbers are AWS's defaults of November 2026. If an account has other quotas, settings take precedence, and the
dispatcher slows down when the runtime throttles it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rollout_backend.base import aws
from rollout_backend.base.aws import Permission
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import AgentCoreConfig
from rollout_backend.config.runtimes import LARGE_REGIONS, SMALL_REGION_SESSIONS

_SERVICE = "bedrock-agentcore"
# Quota codes of Service Quotas.
ACTIVE_SESSIONS, NEW_PER_S = "L-3E5722B2", "L-8EE2AEA2"
# Used until August 2026, when NEW_PER_S was for agents without a container.
OLDER_CONTAINERS_PER_MINUTE = "L-0B3AF7ED"
_SETTING, _NAME = "runtime.max_sessions", "runtime-quotas"


def needed_permissions(config: AgentCoreConfig) -> Sequence[Permission]:
    """Return the permissions for all calls to the runtime that these settings name or describe. Pure."""
    arn = config.arn
    if arn is None:
        # The runtime is created from an image, and its id is not known yet.
        _, partition, _, _, account, _ = str(config.role).split(":", 5)
        arn = f"arn:{partition}:{_SERVICE}:{config.region}:{account}:runtime/{config.runtime_name}-0000000000"
    endpoint = f"{arn}/runtime-endpoint/{config.qualifier}"
    # With an image, the runtime is described before it is changed.
    own = config.image is not None
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


async def account_quotas(region: str, endpoint_url: str | None) -> Mapping[str, float]:
    """Return the account's AgentCore quotas by quota code. Raises one of `aws.CALL_ERRORS`."""
    async with aws.client("service-quotas", region=region, endpoint_url=endpoint_url, retries=1) as client:
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="bedrock-agentcore")
        return {quota["QuotaCode"]: quota["Value"] async for page in pages for quota in page["Quotas"]}


def describe_quotas(limits: AgentCoreConfig, quotas: Mapping[str, float]) -> CheckResult:
    """Compare a run's limits with the account's AgentCore quotas, as listed by Service Quotas. Pure."""
    sessions, rate = quotas.get(ACTIVE_SESSIONS), quotas.get(NEW_PER_S)
    if sessions is None and rate is None:
        return describe_unknown_quotas(limits, "Service Quotas does not list them here")
    if sessions == 0 or rate == 0:
        text = (
            f"Service Quotas grants this account no sessions ({ACTIVE_SESSIONS}, {NEW_PER_S}): ask AWS Support to "
            "enable AgentCore Runtime"
        )
        return CheckResult("problem", _SETTING, text, _NAME)
    above = []
    if sessions is not None and limits.max_sessions > sessions:
        above.append(f"runtime.max_sessions={limits.max_sessions} is above {sessions:g} active sessions")
    if rate is not None and limits.invoke_per_s > rate:
        above.append(f"runtime.invoke_per_s={limits.invoke_per_s:g} is above {rate:g} new sessions per second")
    older = quotas.get(OLDER_CONTAINERS_PER_MINUTE)
    if older is not None and limits.invoke_per_s * 60 > older:
        above.append(
            f"runtime.invoke_per_s={limits.invoke_per_s:g} is above {older / 60:.1f} new containers per second"
        )
    if above:
        text = (
            f"{', and '.join(above)}, which the account's quotas grant: lower the setting, or raise the quota. A run "
            "slows down to what is granted"
        )
        return CheckResult("warning", _SETTING, text, _NAME)
    known = [f"{sessions:,.0f} active sessions"] if sessions is not None else []
    known += [f"{rate:g} new ones per second"] if rate is not None else []
    return CheckResult("ok", _SETTING, f"the account's quotas grant {' and '.join(known)}", _NAME)


def describe_unknown_quotas(limits: AgentCoreConfig, why: str) -> CheckResult:
    """Describe which quotas are assumed. Pure."""
    sessions = AgentCoreConfig.model_fields["max_sessions"].default
    if limits.region not in LARGE_REGIONS:
        sessions = SMALL_REGION_SESSIONS
    text = (
        f"the account's quotas are not known ({why}). AWS's defaults of November 2026 are {sessions:,} active "
        "sessions, and 25 new ones per second"
    )
    return CheckResult("unchecked", _SETTING, text, _NAME)
