"""AgentCore's quotas and the limits of a run."""

import pytest

from rollout_backend.config import AgentCoreConfig
from rollout_backend.runtimes.agentcore.account import ACTIVE_SESSIONS, NEW_PER_S, describe_quotas

ARN = "arn:aws:bedrock-agentcore:{}:000000000000:runtime/agent-0123456789"


@pytest.mark.parametrize(
    ("region", "settings", "quotas", "level", "words"),
    [
        ("us-east-1", {}, {ACTIVE_SESSIONS: 5000.0, NEW_PER_S: 25.0}, "ok", "5,000 active sessions and 25 new"),
        ("us-east-1", {}, {ACTIVE_SESSIONS: 1000.0}, "warning", "runtime.max_sessions=5000 is above 1000 active"),
        ("us-east-1", {"invoke_per_s": 50}, {NEW_PER_S: 25.0}, "warning", "invoke_per_s=50 is above 25 new"),
        (
            "us-east-1",
            {},
            {NEW_PER_S: 25.0, "L-0B3AF7ED": 400.0},
            "warning",
            "is above 6.7 new containers per second",
        ),
        ("us-east-1", {"invoke_per_s": 6.5}, {NEW_PER_S: 25.0, "L-0B3AF7ED": 400.0}, "ok", "25 new ones per second"),
        ("us-east-1", {}, {ACTIVE_SESSIONS: 0.0}, "problem", "ask AWS Support"),
        ("eu-west-1", {}, {"L-OTHER": 1.0}, "unchecked", "defaults of November 2026 are 2,500 active sessions"),
    ],
)
def test_a_runs_limits_and_the_accounts_quotas(region, settings, quotas, level, words):
    found = describe_quotas(AgentCoreConfig(arn=ARN.format(region), **settings), quotas)
    assert (found.level, found.fields()["id"]) == (level, "runtime-quotas")
    assert words in str(found)
