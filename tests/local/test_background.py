"""The background cloud of `rollout deploy --local` after it was killed."""

import json
import os

import pytest
from typer.testing import CliRunner

from rollout_backend.cli import app
from rollout_backend.local.background import STATE, BackgroundCloud, read_background_cloud

ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/rollout_my-0123456789"


@pytest.fixture
def killed(tmp_path):
    """The folder of a cloud whose pid another process has now: this one."""
    folder = tmp_path / ".rollout" / "local-cloud"
    (folder / "sessions").mkdir(parents=True)
    (folder / "cloud.log").touch()
    names = dict.fromkeys(BackgroundCloud.__dataclass_fields__, "")
    (folder / STATE).write_text(json.dumps(names | {"pid": os.getpid(), "started": 1}))
    return folder


def test_a_process_that_has_the_pid_of_a_killed_cloud_is_not_the_cloud(killed):
    assert read_background_cloud(killed) is None


def test_down_removes_the_folder_of_a_killed_cloud(killed, tmp_path, monkeypatch):
    config = tmp_path / "rollout.yaml"
    runtime = {"kind": "agentcore", "arn": ARN, "session_logs": str(killed / "sessions")}
    settings = {"model": {"path": "/m"}, "storage": {"bucket": "rollouts"}, "runtime": runtime}
    config.write_text(json.dumps(settings))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for options, verb, is_left in (((), "would delete", True), (("--yes",), "delete", False)):
        result = CliRunner().invoke(app, ["down", str(config), *options])
        assert result.exit_code == 0, result.output
        assert f"{verb}: {killed}, of a local cloud that has ended" in " ".join(result.output.split())
        assert killed.exists() is is_left
