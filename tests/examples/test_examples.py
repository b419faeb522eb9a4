"""The example agents and the files that they ship with, and a command as an agent."""

import contextlib
import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest
from aiohttp import web

from agent_wrapper import RolloutContext
from agent_wrapper.contract import Sampling
from agent_wrapper.exec import make_app, parse_arguments
from agent_wrapper.outcome import classify
from agent_wrapper.runner import Raised
from builders import served
from rollout_backend.config import load_config
from rollout_backend.core.harbor import VERIFIER
from rollout_backend.core.tasks import Task, read_tasks
from rollout_backend.run.accounts.step_report import GroupResult
from rollout_backend.workbench.local.scripted import ToolCall
from rollouts import make_rollout, make_segment

NAMES = ["arithmetic", "tool_agent"]
SEEDED = {"arithmetic": (64, 0), "tool_agent": ("chain_sum", 64, 0)}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("arithmetic/config.yaml", "agentcore"),
        ("tool_agent/config.yaml", "agentcore"),
        ("swe_agent/config.yaml", "process"),
        ("swe_agent/agentcore.yaml", "agentcore"),
    ],
)
def test_the_settings_are_valid(examples, path, kind):
    settings = load_config(examples / path, env={})
    assert settings.runtime.kind == kind
    assert (settings.scoring.function == VERIFIER) == path.startswith("swe_agent")


@pytest.mark.parametrize("name", NAMES)
def test_the_tasks_match_their_seed(examples, load, name):
    module = load(f"{name}/make_tasks.py")
    made = module.make_tasks(*SEEDED[name], **getattr(module, "SETTINGS", {}))
    lines = (examples / name / "tasks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(made))
    tasks = read_tasks(examples / name / "tasks.jsonl")
    assert len({task.task_id for task in tasks}) == 64


@pytest.mark.parametrize("name", NAMES)
def test_the_image_meets_the_runtimes_requirements(examples, name):
    lines = (examples / name / "Dockerfile").read_text().splitlines()
    assert "FROM python:3.12.11-slim-bookworm" in lines
    assert "EXPOSE 8080" in lines
    assert lines.index("USER 1000") < lines.index('CMD ["python", "agent.py"]')


# --- arithmetic -----------------------------------------------------------------------------------------


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
    rollout = run_agent(arithmetic.app, {"question": "What is 3 + 4?", "answer": "7"}, replies=[reply])
    assert (rollout.outcome, rollout.reward, rollout.extras) == ("completed", reward, {"reply": reply})
    assert [len(segment.turns) for segment in rollout.segments] == [1]


# --- tool_agent -----------------------------------------------------------------------------------------


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


# --- a command ------------------------------------------------------------------------------------------


SOLVE = """
import json, os, sys, urllib.request
body = {"model": os.environ["ANTHROPIC_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["CODEX_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
SCORED = ["--reward", "stdout", "--verifier", 'sh -c \'grep -cx "$1" "$ROLLOUT_OUTPUT_FILE"\' - {payload.answer}']


def test_a_rollout_of_a_command_holds_its_tokens_and_the_verifiers_reward(run_agent):
    app = make_app(parse_arguments([*SCORED, "--", sys.executable, "-c", SOLVE, "{payload.question}"]))
    rollout = run_agent(app, {"question": "2 + 2?", "answer": 4}, replies=["4"])
    assert (rollout.reward, len(rollout.segments), rollout.sampled_tokens) == (1.0, 1, 2)
    assert [message["content"] for message in rollout.segments[0].messages] == ["2 + 2?", "4"]


def test_trl_trains_no_token_without_a_logprob(load):
    """Tokens of a forced format have none, and TRL multiplies all logprobs by the mask, so each must be finite."""
    trl = load("trl_loop/rollouts.py")
    forced, free = make_segment(2, 3, logprob=None), make_segment(3, 2)
    partly = forced.model_copy(update={"logprobs": free.logprobs})
    rollouts = tuple(make_rollout(reward=1.0, segments=[*segments]) for segments in ([forced, partly], [forced]))
    group = GroupResult(Task("task", {}), rollouts, usable=True, planned=2)
    rows = trl.rows_of(SimpleNamespace(groups=[group]), 2, filler_id=0)
    assert [row["env_mask"] for row in rows] == [[0, 1, 1], [0, 0, 0]]
    assert [row["logprobs"] for row in rows] == [[0.0, -0.5, -0.5], [0.0] * 3]
    assert [row["agent_reward"] for row in rows] == [1.0, None], "nothing of the second one can be trained"


@pytest.mark.parametrize("change", ["", "token", "logprob", "target"])
def test_the_tokens_of_a_training_are_compared_with_those_of_the_service(load, tmp_path, change):
    compare = load("train_service/train.py").compare_tokens
    segment = make_segment(prompt=3, sampled=2)
    stored = tmp_path / "run" / "rollouts" / "1" / "task-a.0"
    stored.parent.mkdir(parents=True)
    stored.write_bytes(make_rollout(segments=[segment]).encode())
    prompt = {"chunks": [{"tokens": [0, 1, 2]}]}
    reply = {"tokens": [3, 5 if change == "token" else 4], "logprobs": [-0.5, -0.25 if change == "logprob" else -0.5]}
    inputs = {
        "target_tokens": [1, 2, 4 if change == "target" else 3, 4],
        "logprobs": [0, 0, -0.5, -0.5],
        "advantages": [0, 0, 1, 1],
    }
    datum = {
        "model_input": {"chunks": [{"tokens": [0, 1, 2, 3]}]},
        "loss_fn_inputs": {name: {"data": values} for name, values in inputs.items()},
    }
    with contextlib.closing(sqlite3.connect(tmp_path / "tinker.db")) as database, database:
        database.execute("CREATE TABLE futures (request_type, request_data, result_data, status)")
        for kind, asked, answer in (
            ("SAMPLE", {"prompt": prompt}, {"sequences": [reply]}),
            ("FORWARD_BACKWARD", {"data": [datum]}, {}),
        ):
            database.execute(
                "INSERT INTO futures VALUES (?, ?, ?, 'COMPLETED')", (kind, json.dumps(asked), json.dumps(answer))
            )
    if change:
        with pytest.raises(ValueError, match=r"1 of 1 (replies|trained rows) have other tokens or logprobs"):
            compare(tmp_path / "tinker.db", tmp_path / "run")
    else:
        assert "1 replies and 1 trained rows" in compare(tmp_path / "tinker.db", tmp_path / "run")
