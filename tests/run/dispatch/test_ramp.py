"""Rates and numbers of sessions that follow from the runtime's quotas, and batches that cannot start in time."""

import pytest

from rollout_backend.agents.runtimes.base import open_runtime
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.run.dispatch.ramp import check_ramp


def config(
    region: str = "us-east-1",
    collection_s: float = 450,
    agent_s: float = 60,
    group: dict | None = None,
    **limits: object,
) -> RolloutConfig:
    arn = f"arn:aws:bedrock-agentcore:{region}:123456789012:runtime/my_agent-0123456789"
    times = {"model_call_s": 1, "agent_s": agent_s, "publish_grace_s": 1, "collection_s": collection_s}
    tree = {"model": {"path": "m"}, "storage": {"bucket": "bucket"}, "timeouts": times, "group": group or {}}
    return RolloutConfig.parse({**tree, "runtime": {"kind": "agentcore", "arn": arn, **limits}})


@pytest.mark.parametrize(("region", "sessions"), [("us-east-1", 5_000), ("us-west-2", 5_000), ("eu-west-1", 2_500)])
async def test_limits_follow_from_the_runtimes_region(region, sessions, local_keys):
    settings = config(region, agent_s=200)
    runtime = await open_runtime(settings.runtime)
    try:
        limits = runtime.limits()
    finally:
        await runtime.aclose()
    assert (limits.invoke_per_s, limits.max_sessions) == (24, sessions)
    assert check_ramp(settings, limits, 1024)[0].startswith("1,024 rollouts start within 43 s, at 24 sessions per")
    assert [check_ramp(settings, limits, rollouts)[1] for rollouts in (sessions, sessions + 1)] == [True, False]


def test_more_rollouts_than_sessions_run_in_waves():
    settings = config(max_sessions=400)
    assert check_ramp(settings, settings.runtime, 1024)[0].endswith(
        "in 3 waves of 400 sessions (runtime.max_sessions)"
    )


def test_a_batch_that_cannot_finish_is_refused_with_advice():
    settings = config(invoke_per_s=6.5, collection_s=157)
    with pytest.raises(ConfigError, match=r"1,024 rollouts cannot finish within timeouts\.collection_s \(157 s\)"):
        check_ramp(settings, settings.runtime, 1024)
    check_ramp(config(collection_s=158), settings.runtime, 1024)


@pytest.mark.parametrize(("group", "needed"), [({"policy": "strict"}, 1024), ({}, 256)])
def test_a_target_replaces_the_number_of_planned_rollouts(group, needed):
    group = {"size": 8, "target_groups": 128, **group}  # by default, min_viable: two of each are enough
    settings = config(collection_s=70, invoke_per_s=1, group=group)
    with pytest.raises(ConfigError, match=f"^{needed:,} rollouts cannot finish"):
        check_ramp(settings, settings.runtime, 2048)
