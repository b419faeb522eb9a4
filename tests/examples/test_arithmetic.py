import pytest

TASK = {"question": "What is 3 + 4? Answer with only a number.", "answer": "7"}


@pytest.fixture(scope="module")
def arithmetic(load):
    return load("arithmetic/agent.py")


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("7", True),
        ("The answer is 7.", True),
        ("-7", False),
        ("7 or 8", False),
        ("seven", False),
    ],
)
def test_the_last_integer_counts(arithmetic, reply, right):
    assert arithmetic.is_right(reply, "7") is right


@pytest.mark.parametrize(("reply", "reward"), [("7", 1.0), ("8", 0.0)])
def test_a_reply_is_scored(run_agent, arithmetic, reply, reward):
    rollout = run_agent(arithmetic.app, TASK, replies=[reply])
    assert (rollout.outcome, rollout.reward) == ("completed", reward)
    assert rollout.extras == {"reply": reply}
    assert len(rollout.segments) == 1
    assert len(rollout.segments[0].turns) == 1
