"""The commands of a new user, one after the other, without an account."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from builders import processes_with
from rollout_backend.workbench.local.background import STATE

ROOT = Path(__file__).parents[3]


PROGRAM = """
import sys
from pathlib import Path
from rollout_backend import RolloutManager, load_config, read_tasks

config = load_config("rollout.yaml", ["group.size=2"])
with RolloutManager.blocking(config) as manager:
    report = manager.collect(read_tasks(Path(sys.argv[1]))[:1]).report
print(report.outcomes["completed"], "of", report.planned, "completed")
"""


def without_aws(folder: Path) -> dict[str, str]:
    """Return an environment by which all processes of the test are found."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {"MARK": str(folder)}


def rollout(folder: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", "rollout_backend", *arguments]
    done = subprocess.run(
        argv, cwd=folder, env=without_aws(folder), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deploy_doctor_run_down_and_nothing_is_left(tmp_path):
    agent = ROOT / "examples" / "arithmetic"
    told = rollout(tmp_path, "deploy", str(agent), "--local")
    assert "the process ends in time after SIGTERM" in told
    assert "DescribeStacks" not in told
    assert "accepts a rollout, and writes its result" in told
    cloud = json.loads((tmp_path / ".rollout" / "local-cloud" / STATE).read_text())
    try:
        again = rollout(tmp_path, "deploy", str(agent), "--local")
        assert "making runtime" not in again
        assert "updating runtime" not in again
        rollout(tmp_path, "doctor", "rollout.yaml")
        tasks = str(agent / "tasks.jsonl")
        limits = ("--limit", "2", "-o", "group.size=2")
        run = rollout(tmp_path, "run", "rollout.yaml", "--tasks", tasks, *limits)
        assert "4 = 4 completed" in run
        assert "0 sessions open" in run
        for file in (tmp_path / "rollout.yaml", *tmp_path.glob("runs/*/config.yaml")):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, "it has the URL that lets callers run code"
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, tasks],
            cwd=tmp_path,
            env=without_aws(tmp_path),
            capture_output=True,
            text=True,
        )
        assert program.stdout.endswith("2 of 2 completed\n"), program.stderr
        planned = rollout(tmp_path, "down", "rollout.yaml")
        assert "would delete: runtime rollout_arithmetic" in planned
        assert "nothing was changed" in planned
        assert "stays: runs, the records and reports of runs on this machine" in planned
        removed = rollout(tmp_path / "runs", "down", "../rollout.yaml", "--yes")  # from any folder
        assert "nothing else that this backend made is left" in removed
    finally:
        if Path(f"/proc/{cloud['pid']}").exists():
            os.kill(cloud["pid"], 15)
    assert processes_with(str(tmp_path)) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout.yaml", "runs"]
    shutil.rmtree(tmp_path / "runs")
