"""The fixtures as installed for a user of the package."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from agent_servers import BARE_AGENT
from agent_wrapper import RolloutApp
from rollout_backend.errors import ConfigError
from rollout_backend.workbench.local.harness import AgentRunError
from rollout_backend.workbench.local.scripted import ToolCall

AGENT = """
import os
import openai
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
async def agent(context):
    question = {"role": "user", "content": context.payload["question"]}
    async with openai.AsyncOpenAI(**context.openai_kwargs()) as client:
        answer = await client.chat.completions.create(model=context.model, messages=[question])
    said = answer.choices[0].message.content
    reward = float(said == context.payload["answer"])
    return {"reward": reward, "pid": os.getpid(), "colour": os.environ.get("COLOUR")}

if __name__ == "__main__":
    app.run()
"""
TASK = {"question": "What is 2 + 2?", "answer": "4"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(AGENT)
    return path


@pytest.fixture(scope="module")
def app() -> RolloutApp:
    names: dict = {"__name__": "agent"}
    exec(AGENT, names)
    return names["app"]


@pytest.mark.parametrize(("said", "reward"), [("4", 1.0), ("5", 0.0)])
def test_reward_of_an_app(run_agent, app, said, reward):
    rollout = run_agent(app, TASK, replies=[said])
    assert rollout.outcome == "completed"
    assert rollout.reward == reward
    assert rollout.extras["pid"] == os.getpid()
    assert rollout.sampled_tokens == 2  # the digit's byte and <|im_end|>
    assert [m["content"] for m in rollout.segments[0].messages] == [TASK["question"], said]


def test_reward_of_a_file(run_agent, script, monkeypatch):
    first = run_agent(script, TASK, replies=["4"])
    monkeypatch.setenv("COLOUR", "green")
    second = run_agent(str(script), TASK, replies=["fish"])
    assert (first.outcome, first.reward, second.reward) == ("completed", 1.0, 0.0)
    assert len({first.extras["pid"], second.extras["pid"], os.getpid()}) == 3
    assert second.extras["colour"] == "green"


@pytest.mark.parametrize("serves", [False, True])
def test_an_app_whose_file_never_serves_is_named_once(run_agent, tmp_path, monkeypatch, recwarn, serves):
    file = tmp_path / f"agent_that_serves_{serves}.py"
    file.write_text(AGENT if serves else AGENT.replace("app.run()", "pass"))
    monkeypatch.syspath_prepend(tmp_path)
    app = importlib.import_module(file.stem).app
    for _ in range(2):
        assert run_agent(app, TASK, replies=["4"]).reward == 1.0
    named = [str(each.message) for each in recwarn if str(file) in str(each.message)]
    assert len(named) == (not serves)
    assert all("in a container, the file ended without serving" in each for each in named)


def test_agent_failures_are_results(run_agent, app):
    broken = run_agent(app, {"question": "?"}, replies=["4"], outcome="agent_error")
    assert broken.reward is None
    assert "KeyError" in broken.failure.traceback
    unscripted = run_agent(app, TASK, replies=[], outcome=None)
    assert unscripted.outcome != "completed"
    assert "requested more than 0 replies" in unscripted.failure.message


def test_another_outcome_fails_the_test_with_the_agents_traceback_and_hides_the_fixture(run_agent, app):
    with pytest.raises(pytest.fail.Exception) as failed:
        run_agent(app, {"question": "?"}, replies=["4"])
    first, *traceback = str(failed.value).splitlines()
    assert first == "the rollout ended as agent_error (agent_exception), not as completed: KeyError: 'answer'"
    assert traceback[0].startswith("Traceback")
    assert "agent_wrapper" not in str(failed.value)
    with pytest.raises(pytest.fail.Exception, match=r"ended as completed with the reward 1\.0, not as timed_out"):
        run_agent(app, TASK, replies=["4"], outcome="timed_out")
    assert [entry.path.name for entry in failed.traceback.filter(failed)] == ["test_pytest_plugin.py"]
    with pytest.raises(ConfigError) as refused:
        run_agent("nowhere.py", TASK, replies=["4"])
    assert [entry.path.name for entry in refused.traceback.filter(refused)] == ["test_pytest_plugin.py"]


def test_agent_that_cannot_run_raises(run_agent, tmp_path):
    crash = tmp_path / "crash.py"
    crash.write_text("raise RuntimeError('no licence')")
    with pytest.raises(AgentRunError, match="no licence"):
        run_agent(crash, TASK, replies=["4"])
    dies = tmp_path / "dies.py"
    dies.write_text(AGENT.replace("import openai\n", "").replace("    question =", "    os._exit(7)\n    question ="))
    with pytest.raises(AgentRunError, match="exited with code 7 without a result"):
        run_agent(dies, TASK, replies=["4"])


def test_scripted_model(scripted_model):
    first, second = scripted_model(["one", "two"]), scripted_model([["three:", ToolCall("a"), ToolCall("b")]])
    assert first.api_key != second.api_key
    client = openai.OpenAI(base_url=second.base_url, api_key=second.api_key, max_retries=0)
    ask = [{"role": "user", "content": "count"}]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
    answer = client.chat.completions.create(model=second.name, messages=ask, tools=tools).choices[0].message
    assert (answer.content.strip(), [each.function.name for each in answer.tool_calls]) == ("three:", ["a", "b"])
    client.close()


def test_local_cloud(local_cloud, monkeypatch):
    import boto3

    monkeypatch.delenv("AWS_PROFILE", raising=False)
    # A botocore session that another test or plugin created: it has read its configuration.
    boto3.setup_default_session()
    assert "default" not in boto3.DEFAULT_SESSION.available_profiles

    cloud = local_cloud(BARE_AGENT[-1], bucket="mine")
    assert os.environ["AWS_ACCESS_KEY_ID"] == cloud.storage.access_key
    s3 = boto3.client("s3", endpoint_url=cloud.settings()["aws"]["endpoint_url"])
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["mine"]
    s3.close()


def test_plugin_imports_nothing_until_used():
    program = "import sys; import rollout_backend.workbench.local.pytest_plugin; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {name for name in loaded if name.startswith(("rollout_backend", "agent_wrapper"))}
    names = ("rollout_backend", "workbench", "local", "pytest_plugin")
    assert ours == {".".join(names[: n + 1]) for n in range(4)}
    assert not {"boto3", "aiohttp", "pydantic", "starlette"} & set(loaded)


def test_pytest_runs_in_an_agents_image_which_has_no_training_side(tmp_path):
    program = "import sys, pytest; sys.modules['rollout_backend'] = None; sys.exit(pytest.main(['--fixtures']))"
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run_agent" not in done.stdout
