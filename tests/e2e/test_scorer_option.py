"""`--scorer FILE.py:FUNCTION` of `rollout dev`, `demo` and `run`: its reward replaces the agent's."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine

pytestmark = pytest.mark.slow
AGENT = """import openai
from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

@app.entrypoint
async def agent(context: RolloutContext):
    async with openai.AsyncOpenAI(**context.openai_kwargs()) as client:
        messages = [{"role": "user", "content": context.payload["question"]}]
        completion = await client.chat.completions.create(model=context.model, messages=messages)
    return {"reward": 0.0, "said": completion.choices[0].message.content}

if __name__ == "__main__":
    app.run()
"""
SCORER = "def score(given):\n    return 0.25 if given.extras['said'] and given.payload['answer'] == '5' else 0.75\n"
TASKS = '{"task_id": "sum", "payload": {"question": "What is 2 + 3?", "answer": "5"}}\n'
Command = Callable[..., list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return a function that makes a command on an agent, a scorer and a task in the folder."""
    for name, text in (("agent.py", AGENT), ("scorer.py", SCORER), ("tasks.jsonl", TASKS)):
        (tmp_path / name).write_text(text)
    return lambda *words: [sys.executable, "-m", "rollout_backend", *words, "--scorer", "scorer.py:score"]


def reward_of(argv: list[str], folder: Path) -> float:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    # Equal rewards teach nothing, which is code 3.
    assert done.returncode == 3, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["mean_reward"]


def test_a_demo_takes_its_rewards_from_the_named_scorer(command: Command, tmp_path: Path):
    argv = command("demo", "--scripted", "--agent", "agent.py", "--tasks", "tasks.jsonl", "--json")
    assert reward_of([*argv, "-o", "group.size=2"], tmp_path) == 0.25


def test_a_run_takes_its_rewards_from_the_named_scorer(command: Command, tmp_path: Path):
    with ScriptedEngine(lambda prompt: "It is 5.") as engine:
        settings = {
            "model": {"path": str(BYTE_MODEL), "renderer": "chatml"},
            "serving": {"kind": "external", "urls": [engine.url]},
            "runtime": {"kind": "process", "app": "agent:app"},
            "group": {"size": 2},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        argv = command("run", "config.yaml", "--local", "--tasks", "tasks.jsonl", "--json")
        assert reward_of(argv, tmp_path) == 0.25


@pytest.mark.parametrize(("reply", "says"), [((), "It is 5."), (("--reply", "1"), "It is 6.")])
def test_dev_scores_with_it_and_an_equal_agent_gets_an_equal_reward(
    command: Command, tmp_path: Path, reply: tuple[str, ...], says: str
):
    """The script would give its next reply to this sum, which differs, after an edit that changes nothing."""
    argv, environ = command("dev", "agent.py", *reply), {**os.environ, "TMPDIR": str(tmp_path)}
    shown = ""
    with subprocess.Popen(argv, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for edit in ("# edited\n", ""):
                for line in iter(process.stdout.readline, ""):
                    shown += line
                    if line.startswith("waiting for a change"):
                        break
                (tmp_path / "agent.py").write_text(AGENT + edit)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    said = re.findall(r"^assistant (.*?)  \(", shown, re.MULTILINE)
    assert said == [says] * 2, shown
    assert re.findall(r"^reward (\S+)", shown, re.MULTILINE) == ["0.25"] * 2, shown
