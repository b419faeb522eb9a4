"""Test agent and scorer with scripted replies of the model. docs/testing-your-agent.md describes the fixture."""

from pathlib import Path

from agent import app

from rollout_backend.workbench.local.scripted import ToolCall

SCORER = f"{Path(__file__).with_name('scorer.py')}:score"
TASK = {"question": "What is 3 + 4? Answer with only a number.", "answer": "7"}


def test_a_right_answer(run_agent):
    replies = [ToolCall("add", {"a": 3, "b": 4}), "It is 7."]
    assert run_agent(app, TASK, replies=replies, scorer=SCORER).reward == 1.0


def test_a_wrong_answer(run_agent):
    assert run_agent(app, TASK, replies=["It is 8."], scorer=SCORER).reward == 0.0
