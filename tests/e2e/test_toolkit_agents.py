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
TOOLKIT = ("runtime.agent_protocol=agentcore-rl-toolkit", "collect.list_interval_s=0.2")
# The examples of release 0.2.0 send a fixed key; those of the main branch send that of the payload.
KINDS = {
    "0.2.0": ((*TOOLKIT, "gateway.key_in_path=true"), [], "status_code"),
    "newest": (TOOLKIT, [], "status_code"),
    "a runtime app": (
        ("runtime.agent_protocol=agentcore-runtime-app", "runtime.poll_interval_s=0.2"),
        ["runtime"],
        "invocation_error",
    ),
}

pytestmark = pytest.mark.slow


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The agent's command, in the environment in which the benchmarks have the package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    environments = importlib.import_module("rivals.environments")
    return [str(environments.python_of("agentcore-rl-toolkit")), str(AGENT)]


def answer(prompt: str) -> str:
    return "It is 4." if "2 + 2" in prompt else "It is 7."


@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_of_the_toolkit_is_trained_token_exact(open_run, script, kind):
    settings, arguments, reason = KINDS[kind]
    one_try = ("group.size=1", "runtime.max_attempts=1")
    run = await open_run(*settings, *one_try, replies=answer, script=[*script, *arguments])
    right, wrong = ({"question": question, "answer": "4", "release": kind} for question in ("2 + 2?", "3 + 3?"))
    tasks = [Task("right", right), Task("wrong", wrong), Task("fails", {**right, "fail": "no such tool"})]
    if arguments:
        tasks.append(Task("dies", {**right, "die": True}))
    result = await run.manager.collect(tasks)
    assert result.report.balanced, result.failures
    rewards = {rollout.task_id: rollout.reward for rollout in result.rollouts if rollout.trainable}
    assert rewards == {"right": 1.0, "wrong": 0.0}
    completed = [rollout for rollout in result.rollouts if rollout.outcome is Outcome.COMPLETED]
    for rollout in completed:
        assert rollout.extras.keys() - {"stop_reason"} == {"reply"}
        assert rollout.seal
        assert "/k/" not in json.dumps(rollout.extras)
    assert len(recorded_calls(completed)) == 2
    is_token_exact(completed, run.engine, answer)
    failures = {failure.task_id: failure for failure in result.failures}
    failed = failures.pop("fails")
    assert (failed.outcome, failed.reason) == (Outcome.AGENT_ERROR, reason)
    assert "no such tool" in failed.message
    assert failures.keys() == ({"dies"} if arguments else set())
    for dead in failures.values():  # its invoke is cut, and its process ends
        assert dead.outcome is Outcome.INFRA_ERROR
        assert dead.reason in ("terminated", "container_lost")
