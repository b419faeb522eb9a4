"""Rates and numbers of sessions that follow from the runtime's quotas, and batches that cannot start in time."""

from bisect import bisect_left

import pytest

from rollout_backend.config import AgentCoreConfig, GroupConfig, RolloutConfig
from rollout_backend.dispatch.ramp import Ramp, check_ramp, enough_rollouts
from rollout_backend.dispatch.rate_limiter import AdaptiveRate
from rollout_backend.errors import ConfigError
from rollout_backend.runtimes.base import open_runtime


def config(region: str = "us-east-1", **limits: object) -> AgentCoreConfig:
    arn = f"arn:aws:bedrock-agentcore:{region}:123456789012:runtime/my_agent-0123456789"
    return AgentCoreConfig.model_validate({"arn": arn, **limits})


@pytest.mark.parametrize(("region", "sessions"), [("us-east-1", 5_000), ("us-west-2", 5_000), ("eu-west-1", 2_500)])
def test_limits_follow_from_the_runtimes_region(region, sessions):
    limits = config(region)
    assert (limits.invoke_per_s, limits.max_sessions) == (24, sessions)


async def test_a_run_takes_its_limits_from_the_runtime(local_keys):
    tree = {
        "model": {"path": "m"},
        "storage": {"bucket": "bucket"},
        "runtime": config("eu-west-1").model_dump(exclude_unset=True),
    }
    settings = RolloutConfig.parse({**tree, "runtime": {"kind": "agentcore", **tree["runtime"]}})
    runtime = await open_runtime(settings.runtime)
    try:
        assert runtime.limits().max_sessions == 2_500
        assert check_ramp(settings, runtime.limits(), 1024)[0].startswith("1,024 rollouts start within 43 s")
        assert [check_ramp(settings, runtime.limits(), rollouts)[1] for rollouts in (2500, 2501)] == [True, False]
    finally:
        await runtime.aclose()


@pytest.mark.parametrize(
    ("limits", "quota", "window_s", "used"), [({"invoke_per_s": 6.5}, 400, 60, 0.95), ({}, 25, 1, 0.9)]
)
def test_a_limiter_stays_below_the_quota_and_uses_it(limits, quota, window_s, used):
    limiter, now = AdaptiveRate(config(**limits).invoke_per_s), 0.0
    sent = []
    while now < 600:
        now += limiter.due(now)
        limiter.take(now)
        sent.append(now)
    after_burst = [
        at for at in sent if window_s == 60 or at > 2
    ]  # the burst of a rested limiter goes beyond a quota per second, once
    windows = [bisect_left(after_burst, at + window_s) - i for i, at in enumerate(after_burst) if at + window_s < 600]
    assert used * quota < max(windows) <= quota


def test_more_rollouts_than_sessions_run_in_waves():
    ramp = Ramp.of(1024, config(max_sessions=400))
    assert ramp.waves == 3
    assert str(ramp).endswith("in 3 waves of 400 sessions (runtime.max_sessions)")


def test_a_batch_that_cannot_finish_is_refused_with_advice():
    ramp = Ramp.of(1024, config(invoke_per_s=6.5))
    with pytest.raises(ConfigError, match=r"1,024 rollouts cannot finish within timeouts\.collection_s \(157 s\)"):
        ramp.check(collection_s=157)
    ramp.check(collection_s=158)
    ramp.check(collection_s=100, enough=512)  # the others are spare


def test_a_target_replaces_the_number_of_planned_rollouts():
    assert enough_rollouts(GroupConfig(size=8)) is None
    assert enough_rollouts(GroupConfig(size=8, target_groups=10, policy="strict")) == 80
    assert enough_rollouts(GroupConfig(size=8, target_groups=10)) == 20  # min_viable: two of each are enough
