"""The trainer with all its servers is killed in the middle of a run and restarts."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from builders import eventually
from rollout_backend.local.scripted import ScriptedEngine

ROLLOUTS = 4


def begun(folder: Path) -> list[str]:
    path = folder / "begun"
    return path.read_text().split() if path.exists() else []


@pytest.mark.slow  # tests/step/test_resume.py restarts the same step in one process
async def test_running_agents_outlive_a_killed_and_restarted_trainer(shared_cloud, base_settings, tmp_path):
    payloads = [{"do": "use a slow tool", "folder": str(tmp_path), "i": i} for i in range(2)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"payload": each}) for each in payloads))
    argv = [sys.executable, "-m", "rollout_backend", "run", "config.yaml", "--tasks", "tasks.jsonl"]
    env = {**os.environ, **shared_cloud.environ}

    async def start(log: Path) -> asyncio.subprocess.Process:
        with log.open("wb") as file:
            return await asyncio.create_subprocess_exec(*argv, cwd=tmp_path, env=env, stdout=file, stderr=file)

    with ScriptedEngine(("Seven.", "Yes.")) as engine:
        tree = {**base_settings, **shared_cloud.settings(), "run_id": "killed"}
        tree["serving"] = {"kind": "external", "urls": [engine.url]}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        first = await start(tmp_path / "first.log")
        await eventually(lambda: len(begun(tmp_path)) == ROLLOUTS or first.returncode is not None)
        assert first.returncode is None, (tmp_path / "first.log").read_text()
        first.send_signal(signal.SIGKILL)
        await first.wait()
        (tmp_path / "go").touch()  # the agents call a gateway that is down
        second = await start(tmp_path / "second.log")
        assert await second.wait() == 3, (tmp_path / "second.log").read_text()  # all rewards are equal
    assert (await shared_cloud.sessions())["sessions"] == []
    run = tmp_path / "runs" / "killed"
    report = json.loads((run / "steps" / "00000000.json").read_text())
    assert report["outcomes"]["completed"] == ROLLOUTS
    assert (report["reattached"], report["resumed"], report["attempts"]) == (ROLLOUTS, 0, 0)
    assert len(begun(tmp_path)) == ROLLOUTS  # no agent was started again
    assert report["trainable"] == ROLLOUTS
    assert report["broken_histories"] == 0
    assert not list((run / "steps").glob("*.in-flight"))
