import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.agents.runtimes.base import open_runtime
from rollout_backend.config import CircuitBreakerConfig, RolloutConfig
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.run.step.circuit_breaker import CircuitBreaker, describe_log
from rollouts import make_ledger

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789"


def entry(outcome=Outcome.INFRA_ERROR, reason="container_error", message="424", by_result=False):
    return LedgerEntry(
        "a.0",
        "a",
        make_ledger(),
        planned_at=0.0,
        session_ids=["session-7"],
        outcome=outcome,
        reason=reason,
        message=message,
        by_result=by_result,
    )


def opened(entries, max_failures=3, min_span_s=0.0, every_s=1.0, running=0):
    breaker = CircuitBreaker(CircuitBreakerConfig(max_failures=max_failures, min_span_s=min_span_s))
    for i, each in enumerate(entries):
        breaker.record_settled(each, i * every_s, "the log")
        breaker.evaluate(0, running)
    return breaker.opened


def test_it_opens_at_the_limit_with_a_diagnosis():
    assert opened([entry()] * 2) is None
    said = opened([entry(), entry(), entry(message="exit code 137")])
    where = "docs/troubleshooting.md#container_error"
    for part in ("3 rollouts", "infra_error, container_error", "exit code 137", "the log", "arm64", "a.0", where):
        assert part in said


@pytest.mark.parametrize(
    "well",
    [
        entry(Outcome.COMPLETED, "", by_result=True),
        entry(Outcome.AGENT_ERROR, "agent_exception", by_result=True),
        entry(Outcome.TIMED_OUT, "agent_deadline", by_result=True),
    ],
    ids=lambda each: each.outcome,
)
def test_any_delivered_rollout_resets_the_count(well):
    assert opened([entry(), entry(), well, entry(), entry()]) is None
    assert opened([entry(), entry(), well, entry(), entry(), entry()])


def test_it_opens_if_no_rollout_has_a_reward():
    none, bad = (entry(Outcome.AGENT_ERROR, reason, by_result=True) for reason in ("no_reward", "bad_reward"))
    said = opened([none, bad, entry(), none, entry(), none])
    for part in ("3 rollouts", "agent_error, no_reward, and no rollout had a reward", "another run_id"):
        assert part in said
    for other in (Outcome.COMPLETED, ""), (Outcome.AGENT_ERROR, "agent_exception"):
        assert opened([none, none, entry(*other, by_result=True), none, none]) is None
    assert opened([entry(), entry(), none, entry(), entry()]) is None, "the infrastructure delivered a result"


@pytest.mark.parametrize(
    "ours",
    [
        entry(Outcome.CANCELLED, "target_reached"),
        entry(Outcome.TIMED_OUT, "straggler"),
        entry(reason="run_failed"),
        entry(reason="task_blocked"),
        entry(reason="throttled"),
        entry(reason="quota_exceeded"),
    ],
    ids=lambda each: each.reason,
)
def test_cancelled_and_throttled_rollouts_do_not_count(ours):
    assert opened([ours] * 9) is None
    assert opened([entry(), entry(), ours, entry()])


def test_reasons_are_counted_separately_and_silent_deaths_as_one():
    terminated = entry(reason="terminated")
    assert opened([entry(), terminated, entry(), terminated]) is None
    assert "container_error" in opened([entry(), terminated, entry(), entry()])
    assert "run out of memory" in opened([entry(Outcome.TIMED_OUT, "no_result")] * 3)


def test_it_opens_once_a_second_wave_of_agents_cannot_reach_the_model():
    unreachable = [entry(reason="model_unreachable", message="http://10.0.0.1:80/v1")]
    assert opened(unreachable * 20, max_failures=20, min_span_s=30.0, every_s=0.1) is None
    said = opened(unreachable * 40, max_failures=20, min_span_s=30.0, every_s=0.8)
    for part in ("infra_error, model_unreachable", "http://10.0.0.1:80/v1", "set gateway.public_url"):
        assert part in said


def test_it_stays_closed_while_more_rollouts_run_than_failed():
    assert opened([entry()] * 30, running=200) is None
    assert opened([entry()] * 30, running=30)
    breaker = CircuitBreaker(CircuitBreakerConfig(max_failures=3, min_span_s=0))
    breaker.evaluate(0, running=5)
    for i in range(4):
        breaker.record_settled(entry(), i, "")
        breaker.evaluate(1, running=0)
    assert breaker.opened is None, "those of another step count"
    breaker.evaluate(0, running=0)
    assert breaker.opened


@pytest.mark.parametrize(
    ("reason", "failures", "every_s", "running", "opens"),
    [
        ("runtime_create_failed", 300, 1.0, 0, False),
        ("runtime_create_failed", 100, 10.0, 16, False),
        ("runtime_create_failed", 60, 10.0, 0, False),
        ("runtime_create_failed", 61, 10.0, 0, True),
        ("container_error", 19, 10.0, 16, False),
        ("container_error", 20, 10.0, 16, True),
    ],
)
def test_images_that_cannot_run_stop_no_run_while_others_may(reason, failures, every_s, running, opens):
    said = opened([entry(reason=reason)] * failures, 20, 30.0, every_s, running)
    assert (said is not None, "and runtime.role" in (said or "")) == (opens, opens and reason != "container_error")


def test_it_can_be_disabled_and_once_open_stays_open():
    assert opened([entry()] * 1000, max_failures=None) is None
    breaker = CircuitBreaker(CircuitBreakerConfig(max_failures=1, min_span_s=0))
    breaker.record_settled(entry(message="the first"), 0.0, "")
    breaker.evaluate(0, 0)
    breaker.record_settled(entry(Outcome.COMPLETED, "", by_result=True), 1.0, "")
    breaker.record_settled(entry(message="the second"), 2.0, "")
    breaker.evaluate(0, 0)
    assert "the first" in breaker.opened


@pytest.mark.parametrize(
    ("runtime", "reason", "place"),
    [
        ({"kind": "agentcore", "arn": ARN}, "container_error", "/my_agent-0123456789-DEFAULT, session session-7"),
        ({"kind": "agentcore", "arn": ARN, "session_logs": "/logs"}, "container_error", "/logs/session-7.log, "),
        ({"kind": "http", "url": "http://agents"}, "container_error", "http://agents"),
        ({"kind": "agentcore", "arn": ARN}, "model_unreachable", "runs/r/logs"),
        ({"kind": "agentcore", "arn": ARN}, "invalid_result", "s3://bucket/p/runs/r/quarantine/"),
    ],
)  # fmt: skip
async def test_the_message_names_the_log(runtime, reason, place):
    storage = {"bucket": "bucket", "prefix": "p/"}
    config = RolloutConfig.parse({"run_id": "r", "model": {"path": "m"}, "storage": storage, "runtime": runtime})
    opened = await open_runtime(config.runtime)
    try:
        assert place in describe_log(config, entry(reason=reason), opened.log_location)
    finally:
        await opened.aclose()
