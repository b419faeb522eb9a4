"""Agents for SageMaker's job runtime, on the emulated AgentCore."""

from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task
from rollout_backend.model.serving.server_process import free_port
from token_exact import is_token_exact

AGENT = Path(__file__).parent / "job_runtime_agent.py"
SETTINGS = (
    "runtime.agent_protocol=sagemaker-job-runtime",
    "collect.list_interval_s=0.2",
    "timeouts.publish_grace_s=4",
)

pytestmark = pytest.mark.slow


def answer(prompt: str) -> str:
    return "It is 4."


async def test_agents_of_the_job_runtime_are_trained_token_exact(open_run, agentcore_python):
    """With botocore's client at the endpoint of their environment, and with the endpoint of their payload."""
    port = free_port()
    # The emulator passes on no variable of AWS.
    script = [
        "env",
        f"AWS_ENDPOINT_URL_SAGEMAKERJOBRUNTIME=http://127.0.0.1:{port}/v1",
        str(agentcore_python),
        str(AGENT),
    ]
    settings = (*SETTINGS, "group.size=1", "runtime.max_attempts=1", f"gateway.port={port}")
    run = await open_run(*settings, replies=answer, script=script)
    payloads = {
        "one": {"rewards": [0.5]},
        "boto3": {"rewards": [0.25, 1], "turns": 2, "boto3": True},
        "fails": {"fail": "no such tool", "boto3": True},
        "unscored": {},
        "after": {"rewards": [1.0], "error_after": "broken pipe"},
        "turns_missing": {"turns": 3, "rewards": [0.25, 1.0]},
    }
    result = await run.manager.collect([Task(name, {"prompt": "2 + 2?", **more}) for name, more in payloads.items()])
    assert result.report.balanced, result.failures
    completed = {each.task_id: each for each in result.rollouts if each.outcome is Outcome.COMPLETED}
    assert {name: (each.reward, tuple(each.turn_rewards)) for name, each in completed.items()} == {
        "one": (0.5, ()),
        "boto3": (1.0, (0.25, 0.0)),
        "after": (1.0, ()),
    }
    is_token_exact([*completed.values()], run.engine, answer)
    failures = {each.task_id: each for each in result.failures}
    assert {name: (each.outcome, each.reason) for name, each in failures.items()} == {
        "fails": (Outcome.AGENT_ERROR, "invocation_error"),
        "unscored": (Outcome.AGENT_ERROR, "no_reward"),
        "turns_missing": (Outcome.AGENT_ERROR, "bad_reward"),
    }
    assert "no such tool" in failures["fails"].message
