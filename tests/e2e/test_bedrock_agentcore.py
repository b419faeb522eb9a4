"""An agent in an app of the bedrock-agentcore SDK, with the real package, on the emulated runtime."""

from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task
from rollout_backend.workbench.local.scripted import ToolCall
from token_exact import is_token_exact, recorded_calls

AGENT = Path(__file__).with_name("strands_agent.py")

pytestmark = pytest.mark.slow


def answer(prompt: str) -> str | ToolCall:
    if "<tool_response>" not in prompt:
        return ToolCall("add", {"a": 2, "b": 2})
    return "It is 4."


async def test_an_agent_with_one_changed_line_is_trained_token_exact(
    open_run, agentcore_python, repository, tmp_path, monkeypatch
):
    """Its model is Bedrock's, made before any invoke, and it returns no reward."""
    reply = "given.extras['result']['content'][0]['text']"
    (tmp_path / "scorer.py").write_text(f"def score(given):\n    return float(given.private['answer'] in {reply})\n")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    settings = ("group.size=2", f"scoring.function={tmp_path / 'scorer.py'}:score")
    run = await open_run(*settings, replies=answer, script=[str(agentcore_python), str(AGENT)])
    tasks = [Task(name, {"prompt": "2 + 2?"}, private={"answer": right}) for name, right in (("a", "4"), ("b", "5"))]
    result = await run.manager.collect(tasks)
    assert result.report.balanced, result.failures
    assert sorted((each.task_id, each.reward) for each in result.rollouts) == [*[("a", 1.0)] * 2, *[("b", 0.0)] * 2]
    for rollout in result.rollouts:
        assert rollout.outcome is Outcome.COMPLETED
        assert [len(segment.turns) for segment in rollout.segments] == [2]
    assert len(recorded_calls(result.rollouts)) == 8
    is_token_exact(result.rollouts, run.engine, answer)
