"""`rollout run --local` with agents as processes: nothing but this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from anyio.from_thread import start_blocking_portal

from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine, ScriptedSums
from tests.emulators.ministack import MiniStack

pytestmark = pytest.mark.slow

AGENT = """
import os, sys
from openai import OpenAI
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
def agent(context):
    if context.payload["question"] == "exit":
        print("the tool has crashed", file=sys.stderr, flush=True)
        os._exit(3)
    client = OpenAI(**context.openai_kwargs())
    messages = [{"role": "user", "content": context.payload["question"]}]
    client.chat.completions.create(model=context.model, messages=messages)
    return 1.0
"""


def run(tmp_path: Path, *arguments: str, **runtime: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [{"task_id": "sum", "payload": {"question": "What is 3 + 4?"}}]
    tasks += [{"task_id": "exit", "payload": {"question": "exit"}}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    with ScriptedEngine(ScriptedSums()) as engine:
        settings = {
            "run_id": "r",
            "model": {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": 32_768},
            "serving": {"kind": "external", "urls": [engine.url]},
            "group": {"size": 2},
            "runtime": {"kind": "process", "app": "agent:app", "max_attempts": 1, **runtime},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        argv = ["run", "config.yaml", "--tasks", "tasks.jsonl", *arguments]
        argv = [sys.executable, "-m", "rollout_backend", *argv]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_needs_nothing_but_this_machine(tmp_path):
    done = run(tmp_path, "--local")
    assert done.returncode == 3, done.stdout + done.stderr  # all rewards are equal
    lines = (tmp_path / "runs" / "r" / "steps" / "00000000.rollouts.jsonl").read_text().splitlines()
    records = {record["rollout_id"]: record for record in map(json.loads, lines)}
    assert [records[f"sum.{n}"]["outcome"] for n in range(2)] == ["completed"] * 2
    lost = [records[f"exit.{n}"] for n in range(2)]
    assert {record["outcome"] for record in lost} <= {"infra_error", "cancelled"}  # cancelled: its group was doomed
    [told] = {record["message"].partition(" Log: ")[0].partition("ended ")[2] for record in lost if record["message"]}
    assert told == "without a result: it exited with code 3: the tool has crashed."
    sessions = tmp_path / "runs" / "r" / "logs" / "sessions"
    assert {path.suffix for path in sessions.iterdir()} == {".log"}
    again = subprocess.run(
        [sys.executable, "-m", "rollout_backend", "run", "--resume", "r"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2
    assert "its S3 was on this machine and ended with it" in again.stderr


def test_s3_and_sqs_at_different_addresses(tmp_path, local_aws):
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(MiniStack(tmp_path)) as other:
        addresses = {"s3_endpoint_url": local_aws.endpoint_url, "sqs_endpoint_url": other.endpoint_url}
        settings = {"aws": addresses, "storage.bucket": local_aws.bucket, "collect.list_after_idle_s": 3600}
        done = run(
            tmp_path, *(part for name, value in settings.items() for part in ("-o", f"{name}={json.dumps(value)}"))
        )
    assert done.returncode == 3, done.stdout + done.stderr  # all rewards are equal
    text = (tmp_path / "runs" / "r" / "steps" / "00000000.rollouts.jsonl").read_text()
    records = {record["rollout_id"]: record for record in map(json.loads, text.splitlines())}
    assert [records[f"sum.{n}"]["outcome"] for n in range(2)] == ["completed"] * 2


def test_local_storage_is_refused_where_agents_may_not_reach_it(tmp_path):
    done = run(tmp_path, "--local", "-o", "runtime={kind: http, url: 'http://agents.internal'}")
    assert done.returncode == 2
    assert "set runtime.kind=process" in done.stderr
