"""The mistakes of a newcomer, and what the command line says about each.

tests/README.md lists fourteen of them. Rewards that are all equal are in `tests/run/accounts/test_verdict.py`.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from builders import eventually
from rollout_backend.config import load_config
from rollout_backend.core.reasons import NOT_SERVING_TEXT
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError
from rollout_backend.manager import RolloutManager
from rollout_backend.run.checks.machine import check_agent, check_machine
from rollout_backend.views.run_data import read_run
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine
from stub_server import Request, StubServer

APP = "from agent_wrapper import RolloutApp\napp = RolloutApp()\n@app.entrypoint\ndef agent(context): ...\n"
ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/my_agent-0123456789"


@pytest.fixture(scope="module")
def pingable() -> Iterator[str]:
    """A server that answers as an agent's container does to the check."""
    with StubServer(lambda request: (200, b"{}")) as server:
        yield server.url


@pytest.fixture
def config(settings, pingable, tmp_path):
    """Write a config without mistakes, with some settings replaced, and return its path."""

    def write(changes: dict[str, object]) -> Path:
        limits = {"connect_timeout_s": 120, "read_timeout_s": 120}  # a busy machine is no problem of the config
        path = settings(runtime={"kind": "http", "url": pingable, **limits})
        tree = yaml.safe_load(path.read_text())
        for key, value in changes.items():
            *sections, name = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


MISTAKES = {
    "key typo": ({"gateway.publicurl": "x"}, "gateway.publicurl: no such setting; did you mean gateway.public_url?"),
    "timeouts that do not nest": (
        {"timeouts": {"model_call_s": 2000, "agent_s": 1800, "collection_s": 1000}},
        "model_call_s (2000) is not below agent_s (1800): raise agent_s or lower model_call_s; "
        "agent_s + publish_grace_s (1920) is not below collection_s (1000)",
    ),
    "public_url without a scheme": (
        {"gateway.public_url": "localhost:8000"},
        "gateway: public_url='localhost:8000' is not a URL such as https://gateway.example.com",
    ),
    "AgentCore with a loopback gateway": (
        {"runtime": {"kind": "agentcore", "arn": ARN, "endpoint_url": "http://192.0.2.1"}},
        "problem gateway.public_url: agents run at 192.0.2.1 and would call http://127.0.0.1, which is their "
        "own loopback address. Set gateway.host to 0.0.0.0, gateway.port, and gateway.public_url",
    ),
    "model that is not there": ({"model.path": "/no/model"}, "problem model.path: there is no folder /no/model"),
    "model of a hub": ({"model.path": "Qwen/Qwen3-4B"}, "download the model first: hf download Qwen/Qwen3-4B"),
    "model folder without a tokenizer": ({"model.path": "/tmp"}, "problem model.path: /tmp holds no tokenizer that"),
    "renderer typo": (
        {"model.renderer": "qwen33"},
        "problem model.renderer: there is no renderer 'qwen33'; did you mean qwen3? Known are",
    ),
    "renderer unfit for the model": (
        {"model.renderer": "qwen3"},
        f"problem model.renderer: qwen3 cannot be used with {BYTE_MODEL}: Special token '<tool_call>' not found",
    ),
    "no GPU": (
        {"serving": {"kind": "process", "servers": 9, "tensor_parallel": 8, "python": sys.executable}},
        "problem serving.device: the engines need 72 GPUs (serving.servers and the parallel sizes), and this machine "
        "shows 2: lower those settings",
    ),
    "engines without SGLang": (
        {"serving": {"kind": "process"}},
        "problem serving.python: SGLang is not installed in this environment: without a GPU, run `rollout engine "
        "install --engine sglang` and set serving.device=cpu. On GPUs, install it in another environment by this "
        "command, and set serving.python=engine/bin/python: uv venv engine && uv pip install --python "
        "engine/bin/python sglang==",
    ),
    "interpreter that is not there": (
        {"serving": {"kind": "process", "python": "/no/python", "device": "cpu"}},
        "problem serving.python: /no/python is no program that can be run",
    ),
    "engine that is not there": (
        {"serving.urls": ["http://127.0.0.1:9"]},
        "warning serving.urls: nothing listens at http://127.0.0.1:9 yet (Connection refused): start that server",
    ),
    "address of another machine": (
        {"gateway.host": "192.0.2.1"},
        "problem gateway.host: no port is free on 192.0.2.1: set gateway.host to an address of this machine",
    ),
    "missing certificate": (
        {"gateway.tls_certificate": "/no/cert.pem", "gateway.tls_key": "/no/key.pem"},
        "problem gateway.tls_certificate: the gateway cannot serve HTTPS with",
    ),
}


def checked(path: Path) -> str:
    """Return what `rollout doctor` prints of the settings and this machine, without asking the services."""
    try:
        found = check_machine(load_config(path, env={}))
    except ConfigError as error:
        return str(error)
    return "\n".join(f"{each.level} {each}" for each in found)


@pytest.mark.parametrize(("changes", "words"), MISTAKES.values(), ids=MISTAKES)
def test_the_check_names_the_setting_and_what_to_do(config, changes, words, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)  # no test depends on the machine's GPUs, or on its SGLang
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,-1")
    assert words in " ".join(checked(config(changes)).split())


def test_every_problem_is_listed_by_the_check_and_by_a_run(rollout, config, tasks):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        changes = {
            "model.renderer": "qwen3",
            "gateway.port": port,
            "observe.metrics_port": port,
            "observe.otlp_endpoint": "http://127.0.0.1:9",
            "storage.bucket": "no-such",
            "output_dir": "/dev/null",
        }
        path = config(changes)
        code, output = rollout("doctor", path, "--json")
        assert code == 2
        found = {each["id"]: each for each in json.loads(output)}
        assert {name for name, each in found.items() if each["level"] == "problem"} == {
            "model.renderer",
            "gateway.port",
            "observe.metrics_port",
            "storage.bucket",
            "output_dir",
        }
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in found["gateway.port"]["text"]
        assert found["queue.url"]["level"] == found["runtime"]["level"] == "ok"
        assert "nothing listens" in found["observe.otlp_endpoint"]["text"]
        code, output = rollout("run", path, "--tasks", tasks)
    assert code == 2
    assert "error: 5 problems were found:" in output, output
    for setting in ("model.renderer", "gateway.port", "observe.metrics_port", "storage.bucket", "output_dir"):
        assert f"- {setting}: " in output
    assert "starting" not in output


def test_invalid_settings_are_json_too(rollout, config):
    code, output = rollout("doctor", config({"grup": {}}), "--json")
    [found] = json.loads(output)
    assert "grup: no such setting; did you mean group?" in found["text"]
    assert (code, found["level"]) == (2, "problem")


def test_a_config_without_mistakes_passes(rollout, config):
    code, output = rollout("doctor", config({}))
    assert (code, output.endswith(": a run can start")) == (0, True), output
    assert "model.context_length, model.renderer" in output, "what passed is folded"
    code, output = rollout("doctor", config({}), "--verbose")
    assert code == 0, output
    for words in ("ok model.context_length: ", "ok model.renderer: chatml renders", "ok output_dir:"):
        assert words in output
    assert "problem " not in output


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (5 << 20, "problem output_dir: the disk of {} is full: 5 MiB free. Free space, or set a folder"),
        (500 << 20, "warning output_dir: the disk of {} is nearly full: 500 MiB free"),
    ],
)
def test_a_full_disk(config, tmp_path, monkeypatch, free, words):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, free))
    assert words.format(tmp_path / "runs") in checked(config({}))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "import os\nimport no_such_module\n",
            "problem agent: {}, line 2: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("raise SystemExit(3)\n", "problem agent: {}: it exits with code 3 before it serves"),
        ("import sys\nsys.exit(0)\n", f"problem agent: {{}}: {NOT_SERVING_TEXT}"),
        (f"{APP}if __name__ == '__main__':\n    app.run()\n", "ok agent: {} can be imported and serves"),
        (f"{APP}import socket\nsocket.create_server(('127.0.0.1', 0))\napp.run()\n", "ok agent: {} can be imported"),
        (f"{APP}app.run\n", f"problem agent: {{}}: {NOT_SERVING_TEXT}"),
        ("print('hello')\n", f"problem agent: {{}}: {NOT_SERVING_TEXT} It makes no RolloutApp"),
        ("import socket\nsocket.create_server(('127.0.0.1', 9999))\n", "warning agent: {} serves, but it makes no"),
    ],
    ids=["import error", "code 3", "code 0", "guard", "port and run", "run not called", "no app", "other server"],
)
def test_an_agents_file(tmp_path, source, words):
    agent = tmp_path / "agent.py"
    agent.write_text(source)
    found = check_agent(agent)
    assert f"{found.level} {found}".startswith(words.format(agent))


def test_an_agent_that_cannot_start_is_refused_by_the_check_and_by_a_demo(rollout, config, tasks, tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text("raise SystemExit(3)\n")
    code, output = rollout("doctor", config({}), "--services", "--agent", agent)
    assert f"problem agent: {agent}: it exits" in output
    assert (code, output.endswith("1 problem, 0 warnings: a run cannot start")) == (2, True)
    code, output = rollout("demo", "--agent", agent, "--tasks", tasks)
    assert output.startswith(f"error: agent: {agent}: it exits")
    assert code == 2


@pytest.mark.parametrize(
    "command",
    [("demo", "--scripted", "--agent"), ("dev", "--engine"), ("doctor", "--services", "--agent")],
    ids=lambda words: words[0],
)
def test_an_agent_that_never_serves_is_refused_before_anything_starts(rollout, config, tasks, tmp_path, command):
    agent = tmp_path / "agent.py"
    agent.write_text(APP)
    settings = [config({})] if command[0] == "doctor" else ["--tasks", tasks]
    code, output = rollout(*command, agent, *settings)
    assert f"{agent}: {NOT_SERVING_TEXT}" in output
    assert (code, "installed once" in output, "starting" in output) == (2, False, False)


def test_a_run_counts_an_agent_that_never_serves_as_the_agents_error(rollout, config, tasks, tmp_path):
    (tmp_path / "agent.py").write_text(APP)
    runtime = {"kind": "process", "command": [sys.executable, "agent.py"], "working_dir": str(tmp_path)}
    with ScriptedEngine(["7"]) as engine:
        path = config({"runtime": runtime, "serving.urls": [engine.url]})
        code, output = rollout("run", path, "--tasks", tasks, "--limit", "1")
    assert code == 3, output
    assert "failed in the agent, most often agent_ended" in output
    assert "lost to the infrastructure" not in output


def test_problems_of_one_cause_are_one_and_nothing_is_ok_and_a_problem(rollout, config, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    gateway = {"host": "0.0.0.0", "port": 0, "public_url": "http://localhost:8443"}
    runtime = {"kind": "agentcore", "arn": ARN}
    path = config({"runtime": runtime, "gateway": gateway, "aws": {"region": "us-east-1"}})
    found = json.loads(rollout("doctor", path, "--json")[1])
    [login] = [each for each in found if "there are no AWS credentials" in each["text"]]
    assert login["id"] == "credentials"
    assert "These could not be checked either: storage.bucket, runtime.arn, " in login["text"]
    output = rollout("doctor", path)[1]
    passed = output.partition(" unchecked ")[0]
    assert "problem gateway.public_url" in output
    assert "gateway.public_url" not in passed


def answer_of_aws(request: Request) -> tuple[int, bytes]:
    """Refuse CreateQueue, and answer S3 as from another region."""
    if request.headers.get("X-Amz-Target") == "AmazonSQS.CreateQueue":
        return 403, b'{"__type": "com.amazon.coral.service#AccessDeniedException", "message": "not you"}'
    return 301, b"<Error><Code>PermanentRedirect</Code><Message>use eu-west-1</Message></Error>"


def test_a_wrong_region_and_a_denied_queue(rollout, config):
    with StubServer(answer_of_aws) as aws:
        code, output = rollout("doctor", config({"aws.endpoint_url": aws.url}))
    assert code == 2
    assert "is in another region (PermanentRedirect: use eu-west-1): set aws.region" in output
    assert "CreateQueue is not allowed (not you). Deploy the stack with RunQueues=true" in output


def test_an_engine_without_memory(rollout, config, tasks, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'torch.OutOfMemoryError: CUDA out of memory.'\nexit 1\n")
    python.chmod(0o755)
    changes = {"serving": {"kind": "process", "device": "cpu", "python": str(python), "max_restarts": 0}}
    code, output = rollout("run", config(changes), "--tasks", tasks)
    assert code == 1
    assert "engine-0 ended with code 1 before it was up. It ran out of memory. Lower serving." in output
    assert "Traceback" not in output


async def test_a_wrong_public_url(settings, agent_server, run_id, caplog):
    url = "http://127.0.0.1:9"
    said = f"and agents run: can they reach {url} (gateway.public_url)?"
    with ScriptedEngine(["7"]) as engine:
        path = settings(
            run_id=run_id,
            runtime={"kind": "http", "url": agent_server},
            serving={"kind": "external", "urls": [engine.url]},
            gateway={"public_url": url},
        )
        async with RolloutManager(load_config(path, env={}), gateway_poll_s=0.05) as manager:
            collecting = asyncio.create_task(manager.collect([Task("a", {"question": "?", "answer": "7"})]))

            async def warned() -> bool:
                return said in (await manager.progress()).warning

            await eventually(warned)
            await eventually(lambda: caplog.records)
            await eventually(manager.archive.running_steps)
            os.utime(manager.archive.run_dir / "run.json", (0, 0))
            await eventually(manager.archive.info_renewed_at)
            with pytest.raises(ConfigError, match="step 0 is being collected"):
                await manager.collect([Task("b", {})], step=0)
            with pytest.raises(ConfigError, match="step -1 is not from 0 to 9"):
                await manager.collect([Task("b", {})], step=-1)
            [record] = read_run(manager.archive.run_dir).steps[0].open
            assert record.deadline is not None
            assert record.deadline > time.time()
            collecting.cancel()
            await asyncio.wait([collecting])
    assert manager.archive.running_steps() == {}
    assert [said in record.message for record in caplog.records] == [True]
