"""Default limits that follow from AgentCore's quotas. Pure: the caller asks AgentCore.

The numbers are AWS's defaults of November 2026. Accounts may have others: a setting always takes precedence, and the
dispatcher slows down if the runtime grants less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_backend.config import AgentCoreConfig

CODE_PER_S = 24.0  # quota: 25 new sessions per second of an agent that is deployed as code, without a container
SMALL_REGION_SESSIONS = 2_500  # quota of active sessions outside the large regions
LARGE_REGIONS = frozenset({"us-east-1", "us-west-2"})  # their quota is the default of the setting


def fit_limits(config: AgentCoreConfig, described: Mapping[str, Any]) -> AgentCoreConfig:
    """Return the settings with each unset limit adjusted to the runtime.

    `described` is GetAgentRuntime's answer; empty if these credentials may not ask.
    """
    limits: dict[str, object] = {}
    if "codeConfiguration" in described.get("agentRuntimeArtifact", {}):
        limits["invoke_per_s"] = CODE_PER_S
    if config.region not in LARGE_REGIONS:
        limits["max_sessions"] = SMALL_REGION_SESSIONS
    return config.model_copy(update={k: v for k, v in limits.items() if k not in config.model_fields_set})
