import json

import pytest
from aiohttp import web

from agent_wrapper import RolloutContext
from agent_wrapper.contract import Sampling
from agent_wrapper.outcome import classify
from agent_wrapper.runner import Raised
from builders import served
from rollout_backend.local.scripted import ToolCall


@pytest.fixture(scope="module")
def tool_agent(load):
    return load("tool_agent/agent.py")


@pytest.fixture(scope="module")
def task(examples):
    with (examples / "tool_agent" / "tasks.jsonl").open() as lines:
        payload = json.loads(next(lines))["payload"]
    assert payload["answer"] == "-175"
    return payload


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * -3", -9),
        ("7 / 2", 3.5),
        ("1e3", 1000),
    ],
)
def test_the_calculator(tool_agent, expression, value):
    assert tool_agent.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["1 +", "1 / 0", "2 ** 100", "x", "().__class__", "1\x00", "(" * 150 + "1" + ")" * 150],
)
def test_the_calculator_runs_nothing_else(tool_agent, expression):
    with pytest.raises(ValueError):  # noqa: PT011  the model reads the message
        tool_agent.evaluate(expression)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Answer: -175", 1.0),
        ("15 - 43 is -28. Answer: -175.", 1.0),
        ("Answer: 1\nno, Answer: -175\n", 1.0),
        ("Answer: 175", 0.0),
        ("", 0.0),
    ],
)
def test_the_score(tool_agent, task, reply, reward):
    assert tool_agent.score(reply, task) == reward


def test_turns_with_a_tool_form_one_segment(run_agent, tool_agent, task):
    replies = [
        ToolCall("calculator", {"expression": "15 - 43"}),
        ToolCall("calculator", {"expression": "-28 - 75 - 72"}),
        "Answer: -175",
    ]
    rollout = run_agent(tool_agent.app, task, replies=replies)
    assert (rollout.outcome, rollout.reward, rollout.failure) == ("completed", 1.0, None)
    assert rollout.extras["stop_reason"] == "end_turn"
    assert len(rollout.segments) == 1
    assert len(rollout.segments[0].turns) == 3
    results = [message["content"] for message in rollout.segments[0].messages if message["role"] == "tool"]
    assert [("-28" in text, "-175" in text) for text in map(str, results)] == [(True, False), (False, True)]


def test_endless_tool_calls_are_stopped(run_agent, tool_agent, task):
    replies = [ToolCall("calculator", {"expression": f"{i}"}) for i in range(tool_agent.MAX_TURNS)]
    rollout = run_agent(tool_agent.app, task, replies=replies)
    assert (rollout.outcome, rollout.reward) == ("completed", 0.0)
    assert len(rollout.segments[0].turns) == tool_agent.MAX_TURNS


def test_a_truncated_reply_is_scored(run_agent, tool_agent, task):
    sampling = Sampling(max_tokens=20)
    rollout = run_agent(tool_agent.app, task, replies=["word " * 100], sampling=sampling, outcome="agent_error")
    assert rollout.reward == 0.0
    assert rollout.trainable


async def test_a_lost_model_is_detected_through_the_framework(tool_agent, task):
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"x-should-retry": "false"})

    async with served(refuse) as url:
        env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "k", "ROLLOUT_MODEL": "m"}
        context = RolloutContext.from_environment(task, env)
        with pytest.raises(Exception) as caught:  # noqa: PT011  the framework wraps it
            await tool_agent.agent(context)
    assert classify(Raised(caught.value), context.base_url).failure.reason == "model_unavailable"
