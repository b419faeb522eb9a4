"""A trainer is killed at random times and restarted. Everything except the model is real."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(960)]


def play(repository: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Run a training that is killed and one that is not; return what both came to."""
    command = [sys.executable, str(repository / "benchmarks" / "kill_trainer.py"), "--work", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    assert counts["same training rows"]
    return counts


def test_a_killed_asynchronous_trainer_loses_no_rollout_and_runs_none_twice(tmp_path: Path, repository: Path):
    options = ("--asynchronous", "--steps", "3", "--tasks", "2", "--kills", "3", "--save-every", "2")
    wild = play(repository, tmp_path, *options)["disturbed"]
    assert wild["planned"] == (3 + 2) * 2 * 2  # two batches ahead
    assert wild["outcomes"] == {"completed": wild["planned"]}
    assert wild["oldest"] <= 2


def test_a_killed_trainer_loses_no_rollout_runs_none_twice_and_leaves_none_open(tmp_path: Path, repository: Path):
    counts = play(repository, tmp_path, "--steps", "3", "--tasks", "4", "--kills", "4", "--seed", "1")
    wild = counts["disturbed"]
    assert wild["kills"] >= 1
    assert wild["planned"] == 3 * 4 * 2
    assert wild["outcomes"] == counts["undisturbed"]["outcomes"] == {"completed": 24}
    assert (wild["unaccounted"], wild["finished and run again"], wild["sessions open at the end"]) == (0, 0, 0)


def test_kills_of_all_parts_lose_no_rollout_and_leave_nothing(tmp_path: Path, repository: Path):
    command = [sys.executable, str(repository / "benchmarks" / "long_run.py"), "--hours", "0.04", "--seed", "3"]
    command += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    account, planned = results["account"], results["account"]["planned"]
    assert results["kills"]
    assert planned
    assert account["outcomes"] == {"completed": planned}
    assert (account["planned once"], account["trained"], account["results in S3"]) == (planned, planned, planned)
    assert (account["finished and run again"], account["failures"]) == (0, [])
    assert account["left"] == {"sessions": 0, "queues": 0, "processes": 0}
