"""Agents in `AgentCoreRLApp` and `AgentCoreRuntimeApp`, with the real package, on the emulated runtime."""

import importlib
import json
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task
from token_exact import is_token_exact, recorded_calls

ROOT = Path(__file__).parents[2]
AGENT = Path(__file__).parent / "toolkit_agent.py"
SETTINGS = ("runtime.agent_protocol=agentcore-rl-toolkit", "gateway.key_in_path=true", "collect.list_interval_s=0.2")

pytestmark = pytest.mark.slow


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The agent's command, in the environment in which the benchmarks have the package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    environments = importlib.import_module("rivals.environments")
    return [str(environments.python_of("agentcore-rl-toolkit")), str(AGENT)]


def answer(prompt: str) -> str:
    return "It is 4." if "2 + 2" in prompt else "It is 7."


@pytest.mark.parametrize(
    ("release", "settings"), [("0.2.0", SETTINGS), ("newest", (SETTINGS[0], *SETTINGS[2:]))], ids=["0.2.0", "newest"]
)
async def test_an_agent_of_the_toolkit_is_trained_token_exact(open_run, script, release, settings):
    """The examples of release 0.2.0 send a fixed key; those of the main branch send that of the payload."""
    run = await open_run(*settings, "group.size=1", replies=answer, script=script)
    tasks = [
        Task("right", {"question": "2 + 2?", "answer": "4", "release": release}),
        Task("wrong", {"question": "3 + 3?", "answer": "4", "release": release}),
        Task("fails", {"question": "2 + 2?", "answer": "4", "release": release, "fail": "no such tool"}),
    ]
    result = await run.manager.collect(tasks)
    assert result.report.balanced, result.failures
    rewards = {rollout.task_id: rollout.reward for rollout in result.rollouts if rollout.trainable}
    assert rewards == {"right": 1.0, "wrong": 0.0}
    completed = [rollout for rollout in result.rollouts if rollout.outcome is Outcome.COMPLETED]
    for rollout in completed:
        assert rollout.extras.keys() == {"reply", "stop_reason"}
        assert rollout.seal
        assert "/k/" not in json.dumps(rollout.extras)
    assert len(recorded_calls(completed)) == 2
    is_token_exact(completed, run.engine, answer)
    [failure] = result.failures
    assert (failure.task_id, failure.outcome, failure.reason) == ("fails", Outcome.AGENT_ERROR, "status_code")
    assert "no such tool" in failure.message


async def test_an_agent_in_a_runtime_app_is_trained_token_exact(open_run, script):
    settings = ("runtime.agent_protocol=agentcore-runtime-app", "runtime.poll_interval_s=0.2", "group.size=1")
    run = await open_run(*settings, "runtime.max_attempts=1", replies=answer, script=[*script, "runtime"])
    tasks = [
        Task("right", {"question": "2 + 2?", "answer": "4"}),
        Task("wrong", {"question": "3 + 3?", "answer": "4"}),
        Task("fails", {"question": "2 + 2?", "answer": "4", "fail": "no such tool"}),
        Task("dies", {"question": "2 + 2?", "answer": "4", "die": True}),
    ]
    result = await run.manager.collect(tasks)
    assert result.report.balanced, result.failures
    rewards = {rollout.task_id: rollout.reward for rollout in result.rollouts if rollout.trainable}
    assert rewards == {"right": 1.0, "wrong": 0.0}
    completed = [rollout for rollout in result.rollouts if rollout.outcome is Outcome.COMPLETED]
    assert len(recorded_calls(completed)) == 2
    is_token_exact(completed, run.engine, answer)
    failures = {failure.task_id: failure for failure in result.failures}
    failed = failures["fails"]
    assert (failed.outcome, failed.reason) == (Outcome.AGENT_ERROR, "invocation_error")
    assert "no such tool" in failed.message
    assert failures["dies"].outcome is Outcome.INFRA_ERROR
    assert failures["dies"].reason in ("terminated", "container_lost")  # its invoke is cut, and its process ends
