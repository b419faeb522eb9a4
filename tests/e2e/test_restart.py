"""The gateway, or the trainer with all its servers, is killed in the middle of a run and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from rollout_backend.core.tasks import Task
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.local.session_pool import EmulatorLimits

AGENT = """
import asyncio
from pathlib import Path
from openai import AsyncOpenAI
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
async def agent(context):
    folder, messages = Path(context.payload["folder"]), []
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        for question in ("What is 3 + 4?", "Are you sure?"):
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model=context.model, messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            if len(messages) == 2:
                with (folder / "begun").open("a") as file:
                    file.write(context.rollout_id + "\\n")
                while not (folder / "go").exists():  # a slow tool
                    await asyncio.sleep(0.05)
    return 1.0

if __name__ == "__main__":
    app.run()
"""
ROLLOUTS = 4


@pytest.fixture
def patient(tmp_path: Path) -> Path:
    path = tmp_path / "patient" / "agent.py"
    path.parent.mkdir()
    path.write_text(dedent(AGENT))
    return path


def begun(folder: Path) -> list[str]:
    path = folder / "begun"
    return path.read_text().split() if path.exists() else []


async def until(condition: Callable[[], object], what: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_killed_gateway_loses_nothing(
    open_run: Callable[..., Awaitable[Any]], patient: Path, tmp_path: Path
) -> None:
    bench = await open_run(replies=("Seven.", "Yes."), script=patient)
    tasks = [Task(f"t{i}", {"folder": str(tmp_path), "i": i}) for i in range(2)]
    collecting = asyncio.create_task(bench.manager.collect(tasks))
    await until(lambda: len(begun(tmp_path)) == ROLLOUTS or collecting.done())
    [shard] = bench.manager._run.serving.gateways._shards
    url, first = shard.url, shard._process.pid
    os.kill(first, signal.SIGKILL)
    (tmp_path / "go").touch()
    result = await collecting
    assert result.report.outcomes["completed"] == ROLLOUTS
    assert result.report.attempts == ROLLOUTS
    for rollout in result.rollouts:
        [segment] = rollout.segments
        assert len(segment.turns) == 2
    assert result.report.trainable == ROLLOUTS
    assert shard.url == url
    assert shard._process.pid != first
    assert len(begun(tmp_path)) == ROLLOUTS


async def test_running_agents_outlive_a_killed_and_restarted_trainer(
    patient: Path, base_settings: dict[str, Any], tmp_path: Path
) -> None:
    lines = [json.dumps({"payload": {"folder": str(tmp_path), "i": i}}) for i in range(2)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    with ScriptedEngine(("Seven.", "Yes.")) as engine:
        async with LocalCloud(patient, run_dir=tmp_path / "logs", limits=EmulatorLimits(grace_s=2.0)) as cloud:
            tree = {**base_settings, **cloud.settings(by_image=True), "run_id": "killed"}
            tree["serving"] = {"kind": "external", "urls": [engine.url]}
            tree["timeouts"] = {**base_settings["timeouts"], "agent_s": 100, "collection_s": 150, "token_s": 200}
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
            argv = [sys.executable, "-m", "rollout_backend.cli", "run", "config.yaml", "--tasks", "tasks.jsonl"]

            async def start(log: str) -> asyncio.subprocess.Process:
                with (tmp_path / log).open("wb") as file:
                    return await asyncio.create_subprocess_exec(
                        *argv, cwd=tmp_path, env={**os.environ, **cloud.environ}, stdout=file, stderr=file
                    )

            first = await start("first.log")
            await until(lambda: len(begun(tmp_path)) == ROLLOUTS, (tmp_path / "first.log").read_text)
            rival = await start("rival.log")  # refused, and changes nothing
            assert await asyncio.wait_for(rival.wait(), 60) == 1
            refusal = " ".join((tmp_path / "rival.log").read_text().split())
            assert f"run 'killed' is held by another manager (process {first.pid} on" in refusal
            assert len((await cloud.sessions())["sessions"]) == ROLLOUTS
            first.send_signal(signal.SIGKILL)
            await first.wait()
            (tmp_path / "go").touch()  # the agents call a gateway that is down
            second = await start("second.log")
            assert await asyncio.wait_for(second.wait(), 120) == 0, (tmp_path / "second.log").read_text()
            assert (await cloud.sessions())["sessions"] == []
    run = tmp_path / "runs" / "killed"
    report = json.loads((run / "steps" / "00000000.json").read_text())
    assert report["outcomes"]["completed"] == ROLLOUTS
    assert (report["reattached"], report["resumed"], report["attempts"]) == (ROLLOUTS, 0, 0)
    assert len(begun(tmp_path)) == ROLLOUTS  # no agent started again
    assert report["trainable"] == ROLLOUTS
    assert report["broken_histories"] == 0
    assert not list((run / "steps").glob("*.in-flight"))
