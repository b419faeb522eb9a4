"""Test the reward with scripted replies of the model. docs/testing-your-agent.md describes the fixture."""

from agent import app

from rollout_backend.workbench.local.scripted import ToolCall

TASK = {"question": "What is 3 + 4? Answer with only a number.", "answer": "7"}


def test_a_right_answer(run_agent):
    rollout = run_agent(app, TASK, replies=[ToolCall("add", {"a": 3, "b": 4}), "It is 7."])
    assert rollout.reward == 1.0
    assert len(rollout.segments) == 1  # all turns are trained as one sequence
    assert len(rollout.segments[0].turns) == 2


def test_a_wrong_answer(run_agent):
    assert run_agent(app, TASK, replies=["It is 8."]).reward == 0.0
