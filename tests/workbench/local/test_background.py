"""The background cloud of `rollout deploy --local` after it was killed, and after a deployment that failed."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_backend.base.check_result import CheckResult
from rollout_backend.cli import app
from rollout_backend.workbench.deploy import contract_check
from rollout_backend.workbench.local import background
from rollout_backend.workbench.local.background import STATE, BackgroundCloud, read_background_cloud

ROOT = Path(__file__).parents[3]
ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/rollout_my-0123456789"

NAMES = dict.fromkeys(BackgroundCloud.__dataclass_fields__, "")
CLOUD = BackgroundCloud(**NAMES | {"pid": os.getpid(), "started": 1})


@pytest.fixture
def killed(tmp_path):
    """The folder of a cloud whose pid another process has now: this one."""
    folder = tmp_path / ".rollout" / "local-cloud"
    (folder / "sessions").mkdir(parents=True)
    (folder / "cloud.log").touch()
    (folder / STATE).write_text(json.dumps(asdict(CLOUD)))
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


def test_a_deployment_that_fails_stops_the_cloud_that_it_started(tmp_path, monkeypatch):
    async def check(*_: object) -> list[CheckResult]:
        return [CheckResult("problem", "agent", "it does not start")]

    stopped: list[BackgroundCloud] = []
    monkeypatch.setattr(contract_check, "check_contract", check)
    monkeypatch.setattr(background, "start_background_cloud", lambda folder: CLOUD)
    monkeypatch.setattr(background, "stop_background_cloud", stopped.append)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["deploy", str(ROOT / "examples" / "arithmetic"), "--local"])
    assert "it does not start" in result.output
    assert (result.exit_code, stopped) == (2, [CLOUD])
