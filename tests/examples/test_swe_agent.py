"""mini-swe-agent on generated Harbor tasks: at the AgentCore emulator, and as processes of this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from agent_wrapper.contract import Rollout
from rollout_backend.config import load_config
from rollout_backend.core.harbor import VERIFIER
from rollout_backend.core.tasks import read_tasks
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine, ToolCall
from token_exact import is_token_exact, recorded_calls

MODEL = f"model={{path: {BYTE_MODEL}, renderer: chatml, context_length: 32768}}"
FIXED, GIVEN_UP = "chunks", "clamp"  # the first two tasks


@pytest.fixture(scope="module")
def made(load):
    return load("swe_agent/make_tasks.py")


def passes(code: str, name: str, cases) -> bool:
    space: dict = {}
    exec(dedent(code), space)
    return all(space[name](*arguments) == expected for arguments, expected in cases)


def test_each_of_the_ten_tasks_has_one_bug_that_its_hidden_tests_find(made, tmp_path):
    made.make_tasks(tmp_path)
    assert [task.task_id for task in read_tasks(f"harbor:{tmp_path}")] == sorted(bug.name for bug in made.BUGS)
    assert len(made.BUGS) == 10
    for bug in made.BUGS:
        assert bug.code.count(bug.wrong) == 1, bug.name
        assert passes(bug.code.replace(bug.wrong, bug.right), bug.name, bug.cases), bug.name
        if bug.name != "gcd":  # does not end
            assert not passes(bug.code, bug.name, bug.cases), bug.name


def test_the_settings_are_valid(examples):
    settings = load_config(examples / "swe_agent" / "config.yaml", env={})
    assert (settings.runtime.kind, settings.scoring.function) == ("process", VERIFIER)


def script(bugs):
    """Return a model that reads a file, fixes one task's bug, and submits; it gives the other up at once."""
    done = ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})

    def reply(prompt: str) -> str | ToolCall:
        bug = next((each for each in bugs if f"`{each.name}` in" in prompt), None)
        if bug is None:
            return "ok"  # to the probe of the endpoint
        if bug.name == GIVEN_UP:
            return done
        file = f"{bug.name}.py"
        edit = f"from pathlib import Path; f = Path({file!r}); "
        edit += f"f.write_text(f.read_text().replace({bug.wrong!r}, {bug.right!r}))"
        look = ToolCall("bash", {"command": f"cat {file}"})
        fix = ToolCall("bash", {"command": f"python -c {shlex.quote(edit)}"})
        return (look, fix, done)[prompt.count("<|im_start|>assistant\n") - 1]

    return reply


def at_the_emulator(example: Path, engine: ScriptedEngine) -> list[str]:
    overrides = [MODEL, f"scoring.function={VERIFIER}", "sampling.max_tokens=2048"]
    given = ["--agent", str(example / "agent.py"), "--endpoint", engine.url]
    return ["demo", *given, *(part for each in overrides for part in ("-o", each))]


def as_processes(example: Path, engine: ScriptedEngine) -> list[str]:
    serving = f"serving={{kind: external, urls: ['{engine.url}']}}"
    return ["run", str(example / "config.yaml"), "--local", "-o", MODEL, "-o", serving]


@pytest.mark.slow
@pytest.mark.parametrize("form", [at_the_emulator, as_processes])
def test_the_hidden_tests_score_what_an_unmodified_agent_leaves(examples, made, tmp_path, form):
    made.make_tasks(tmp_path / "tasks")
    with ScriptedEngine(script(made.BUGS)) as engine:
        common = ["--tasks", "harbor:tasks", "--limit", "2", "-o", "group.size=1", "-o", "run_id=r"]
        argv = [sys.executable, "-m", "rollout_backend.cli", *form(examples / "swe_agent", engine), *common]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(examples.parent)}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "r" / "steps" / "00000000.rollouts.jsonl").read_text().splitlines()
    records = {record["task_id"]: record for record in map(json.loads, lines)}
    assert {name: record["outcome"] for name, record in records.items()} == {
        FIXED: "completed",
        GIVEN_UP: "completed",
    }
    assert {name: record["result"]["reward"] for name, record in records.items()} == {FIXED: 1.0, GIVEN_UP: 0.0}
    assert [records[name]["result"]["turns"] for name in (FIXED, GIVEN_UP)] == [3, 1]
    assert all(record["trainable"] and record["result"]["segments"] == 1 for record in records.values())
    stored = (tmp_path / "runs" / "r" / "rollouts" / "00000000").glob("[!.]*")
    rollouts = [Rollout.decode(file.read_bytes()) for file in stored]
    assert len(recorded_calls(rollouts)) == 4
    is_token_exact(rollouts, engine, script(made.BUGS))
