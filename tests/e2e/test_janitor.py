"""A run is killed in the middle of a step, and the janitor cleans up after it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import boto3
import pytest
import yaml

from builders import eventually, processes_with
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.local.session_pool import EmulatorLimits
from rollout_backend.local_keys import client_keys

pytestmark = [
    pytest.mark.slow,  # tests/janitor kills a run, too
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def queues(cloud: LocalCloud) -> list[str]:
    keys = client_keys(cloud.storage.endpoint_url)
    where = {"endpoint_url": cloud.storage.endpoint_url, "region_name": cloud.storage.region}
    return list(boto3.client("sqs", **where, **keys).list_queues().get("QueueUrls", []))


async def test_a_killed_run_leaves_no_process_session_or_queue(agent, base_settings, held_back, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"payload": {}}\n')
    limits = EmulatorLimits(grace_s=60.0)
    with ScriptedEngine(held_back) as engine:
        async with LocalCloud(agent, run_dir=tmp_path / "logs", limits=limits) as cloud:
            tree = {**base_settings, **cloud.settings(by_image=True), "run_id": "killed", "janitor": {"grace_s": 0.5}}
            tree["serving"] = {"kind": "external", "urls": [engine.url]}
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
            argv = [sys.executable, "-m", "rollout_backend.cli", "run", "config.yaml", "--tasks", "tasks.jsonl"]
            with (tmp_path / "run.log").open("wb") as log:
                run = await asyncio.create_subprocess_exec(
                    *argv, cwd=tmp_path, env={**os.environ, **cloud.environ, "MARK": "killed"}, stdout=log, stderr=log
                )
            await eventually(lambda: engine.requests or run.returncode is not None)
            assert run.returncode is None, (tmp_path / "run.log").read_text()
            assert len(queues(cloud)) == 2
            assert (await cloud.sessions())["sessions"]
            assert any("rollout_backend.janitor" in command for command in processes_with("MARK=killed").values())
            run.send_signal(signal.SIGKILL)
            await run.wait()

            async def nothing_is_left() -> bool:
                return not (queues(cloud) or (await cloud.sessions())["sessions"] or processes_with("MARK=killed"))

            await eventually(nothing_is_left)
    assert "stopped" in (tmp_path / "runs" / "killed" / "logs" / "janitor.log").read_text()
