"""`rollout dev`: runs after changes, and what they print."""

import asyncio
import base64
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from agent_wrapper.contract import Rollout, readable
from agent_wrapper.shared.workspace import WORKSPACE, pack_folder
from builders import assistant, eventually, function_call, processes_with, run_config, user
from rollout_backend.cli.laptop import find_tasks
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError, TaskFileError
from rollout_backend.model.model_call import ModelCall
from rollout_backend.workbench.local.dev import (
    CallPrinter,
    DevRunner,
    agent_traceback,
    run_after_changes,
    source_changes,
)
from rollout_backend.workbench.local.harness import AgentHarness, AgentRunError, CallProxy, Watcher
from rollouts import make_rollout
from stub_server import Request, StubServer

TASK = Task("paris", {"question": "Weather in [Paris]?"})


CALL = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}]}


async def test_a_call_is_reported_when_it_starts_and_before_its_answer_is_passed_on():
    said: list[str] = []
    started, answered = asyncio.Event(), threading.Event()

    def gateway(request: Request) -> tuple[int, bytes]:
        if request.path == "/v1/messages":
            return 400, b'{"error": "no such field"}'
        assert request.headers["Authorization"] == "Bearer key"
        assert answered.wait(300)
        return 200, b'{"choices": []}'

    def begin(call: ModelCall) -> None:
        said.append(call.messages[0]["content"])
        started.set()

    with StubServer(gateway) as upstream:
        async with CallProxy(upstream.url, begin, said.append) as proxy, httpx.AsyncClient(timeout=300) as agent:
            headers = {"Authorization": "Bearer key"}
            answer = asyncio.create_task(agent.post(f"{proxy.url}/v1/chat/completions", json=CALL, headers=headers))
            await started.wait()
            assert said == ["Weather?"]
            answered.set()
            assert (await answer).json() == {"choices": []}
            # What cannot be read is not reported as a call, and a refusal says why.
            assert (await agent.post(f"{proxy.url}/v1/messages", json={"model": "m"})).status_code == 400
    assert said == ["Weather?", "", '400 {"error": "no such field"}']


def test_each_message_is_printed_once():
    console = Console(file=io.StringIO(), width=200)
    watcher = CallPrinter(console).watcher
    question, reply, result = (
        user("Weather?"),
        assistant("", tool_calls=[function_call("weather", {})]),
        user("sunny"),
    )
    watcher.started(ModelCall("m", [question]))
    watcher.started(ModelCall("m", [question]))  # the client repeats it
    watcher.ended([], "503 no engine")
    watcher.started(ModelCall("m", [question, reply, result]))
    watcher.started(ModelCall("m", [user("another conversation")]))
    for logprobs in ([-0.5], [float("nan")]):
        completion = SimpleNamespace(token_ids=[1], logprobs=logprobs, seconds=0.5, finish_reason="stop")
        watcher.ended([SimpleNamespace(opened=None, completion=completion, messages=[question, reply])], "")
    assert console.file.getvalue().splitlines() == [
        "user      Weather?",
        "the call failed: 503 no engine",
        "user      sunny",
        "user      another conversation",
        "assistant weather({})  (1 tokens, 0.50 s)",
        "assistant weather({})  (1 tokens, 0.50 s, not trained: its format was forced)",
    ]


async def test_a_changed_source_cancels_the_run_and_begins_another_and_other_files_do_not(tmp_path):
    agent, tasks = tmp_path / "agent.py", tmp_path / "tasks.jsonl"
    agent.touch()
    runs: asyncio.Queue[str] = asyncio.Queue()
    said: list[str] = []
    cancelled: list[str] = []

    async def run() -> None:
        runs.put_nowait(text := agent.read_text())
        try:
            await asyncio.Event().wait() if text else None  # the first one ends by itself
        except asyncio.CancelledError:
            cancelled.append(text)
            raise

    loop = asyncio.create_task(run_after_changes(run, source_changes(tmp_path, tasks), said.append))
    async with asyncio.timeout(60):
        assert await runs.get() == ""
        (tmp_path / "output.txt").write_text("written by the agent")
        for text in ("1 / 0", "2 / 0"):
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(agent)
            assert await runs.get() == text
        assert cancelled == ["1 / 0"]
        (tmp_path / "new").touch()
        (tmp_path / "new").rename(tasks)
        await runs.get()
    loop.cancel()
    await asyncio.wait({loop})
    assert (cancelled, loop.cancelled()) == (["1 / 0", "2 / 0", "2 / 0"], True)
    changed = ["agent.py has changed"] * 2 + ["tasks.jsonl has changed"]
    assert [text for text in said if "has changed" in text] == changed


@pytest.mark.parametrize("error", [partial(AgentRunError, log=Path("none.log")), ConfigError])
async def test_an_agent_whose_process_cannot_start_prints_why(tmp_path, error):
    class Harness:
        async def run(self, *_: object, **__: object) -> None:
            raise error("the app did not accept the task: no memory")

    console = Console(file=io.StringIO(), width=200)
    await DevRunner(Harness(), tmp_path / "agent.py", console, run_config()).run(TASK)
    assert console.file.getvalue() == "task paris\nthe app did not accept the task: no memory\n"


async def test_the_tests_of_a_harbor_task_score_what_the_agent_left(tmp_path):
    left, tests = tmp_path / "left", tmp_path / "tests"
    left.mkdir()
    tests.mkdir()
    (left / "answer.txt").write_text("42")
    (tests / "test.sh").write_text("cp answer.txt /logs/verifier/reward.txt")

    class Harness(AgentHarness):
        published = True

        def __init__(self) -> None:
            pass

        async def run(self, *_: object, **__: object) -> Rollout:
            return make_rollout("t.0", reward=0.0)

        async def artifacts(self, rollout: Rollout) -> dict[str, bytes]:
            return {WORKSPACE: pack_folder(left)} if self.published else {}

    harbor = {"tests": base64.b64encode(pack_folder(tests)).decode(), "timeout_s": 600, "env": {}, "workdir": "/app"}
    task = Task("t", {"instruction": "Answer."}, private={"harbor": harbor})
    harness, console = Harness(), Console(file=io.StringIO(), width=200)
    runner = DevRunner(harness, tmp_path / "agent.py", console, run_config())
    await runner.run(task)
    assert "reward 42  (" in console.file.getvalue()
    harness.published = False
    await runner.run(task)
    assert (
        "the task's tests failed: the agent has published no artifact 'workspace.tar.gz'" in console.file.getvalue()
    )


async def test_a_run_in_which_nothing_happens_says_what_it_waits_for(tmp_path):
    console = Console(file=io.StringIO(), width=200)

    async def says(words: str) -> None:
        await eventually(lambda: words in console.file.getvalue())

    class Harness:
        async def run(self, *_: object, watcher: Watcher, **__: object) -> Rollout:
            await says("s: the agent has not called the model yet; its limit is 240 s (timeouts.agent_s)")
            watcher.started(ModelCall("m", [user("Weather?")]))
            await says("s: the model has not answered the agent's call 1 yet; its limit")
            watcher.ended([], "")
            await says("s: the agent has made 1 model call, and has not ended since the last reply; its limit")
            raise AgentRunError("the process of session s exited with code 3 without a result")

    settings = run_config(timeouts={"model_call_s": 60, "agent_s": 240})
    await DevRunner(Harness(), tmp_path / "agent.py", console, settings, quiet_s=0.01).run(TASK)
    printed = console.file.getvalue()
    assert printed.endswith("the process of session s exited with code 3 without a result\n")


def test_a_traceback_keeps_the_agents_frames_only(tmp_path):
    (tmp_path / "agent.py").touch()
    own = f"""\
Traceback (most recent call last):
  File "{tmp_path}/agent.py", line 3, in agent
    ask()
    ~~~^^
"""
    library = """\
  File "/usr/lib/python3/site-packages/openai/_client.py", line 9, in post
    raise Timeout
"""
    installed = f"""\
  File "{tmp_path}/.venv/lib/site-packages/x.py", line 9, in x
    y()
"""
    cause = "Traceback (most recent call last):\n" + library + "openai.Timeout: too late\n"
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert agent_traceback(cause + link + own + library + installed + "ValueError: no\n  more", tmp_path) == (
        own + "ValueError: no\n  more"
    )
    assert agent_traceback(own + "KeyError: 1\n" + link + cause, tmp_path) == (
        own + "KeyError: 1\n\n" + cause.rstrip()
    )


def test_a_task_is_the_first_one_or_named_or_given(tmp_path):
    file = tmp_path / "tasks.jsonl"
    with pytest.raises(ConfigError, match="there is no task file"):
        find_tasks(file, None, 1)
    file.write_text('{"task_id": "a", "payload": {}}\n{"task_id": "b", "payload": {}}\n')
    assert [task.task_id for task in find_tasks(file, None, 1)] == ["a"]
    assert [task.task_id for task in find_tasks(file, None, 9)] == ["a", "b"]
    assert [task.task_id for task in find_tasks(file, "b", 1)] == ["b"]
    assert find_tasks(file, ' {"x": 1}', 1)[0].payload == {"x": 1}
    with pytest.raises(ConfigError, match="has no task 'c'; its first one is 'a'"):
        find_tasks(file, "c", 1)
    with pytest.raises(ConfigError, match="--task is not JSON"):
        find_tasks(file, "{x}", 1)
    with pytest.raises(TaskFileError, match="has no Harbor task"):
        find_tasks(Path(f"harbor:{tmp_path}"), None, 1)


@pytest.mark.slow
def test_a_run_is_printed_and_an_interrupt_ends_everything(repository, tmp_path):
    argv = [sys.executable, "-m", "rollout_backend", "dev", str(repository / "examples/arithmetic/agent.py")]
    with subprocess.Popen(
        argv, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            printed = list(itertools.takewhile(lambda line: not line.startswith("waiting for a"), process.stdout))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert {"task", "user", "assistant", "reward"} <= {line.split()[0] for line in printed if line.strip()}
    assert (processes_with(str(tmp_path)), list(tmp_path.iterdir())) == ({}, [])


def test_output_is_printed_and_the_wrappers_lines_are_not():
    console = Console(file=io.StringIO(), width=200)
    show = CallPrinter(console).watcher.output
    for line in (
        "INFO:     Started server process [1]",
        "2026-11-26 00:28:43,637 INFO agent_wrapper: rollout r accepted in session s",
        "hello [red]\x1b[2J",
        "",
        "2026-11-26 00:28:44,616 ERROR agent_wrapper: the agent raised",
        "Traceback (most recent call last):",
    ):
        show(line)
    assert console.file.getvalue() == f"output    hello [red]{readable(chr(27))}[2J\n"
