"""Test the reward with scripted replies of the model. docs/testing-your-agent.md describes the fixture."""

from agent import app

TASK = {"question": "What is 3 + 4? Answer with only a number.", "answer": "7"}


def test_a_right_answer(run_agent):
    assert run_agent(app, TASK, replies=["It is 7."]).reward == 1.0


def test_a_wrong_answer(run_agent):
    assert run_agent(app, TASK, replies=["It is 8."]).reward == 0.0
