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


def run(repository: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Run a training in which every part is killed. Return its results; none if pieces are left."""
    command = [sys.executable, str(repository / "benchmarks" / "long_run.py"), *options]
    command += ["--work", str(folder / "work"), "--json", str(folder / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = folder / "results.json"
    return dict(json.loads(results.read_text())["results"]) if results.exists() else {}


def left_nothing(account: dict[str, Any]) -> bool:
    left = {"sessions": 0, "queues": 0, "processes": 0}
    return (account["finished and run again"], account["failures"], account["left"]) == (0, [], left)


def test_kills_of_all_parts_lose_no_rollout_and_leave_nothing(tmp_path: Path, repository: Path):
    """The second piece continues where the machine of the first one lost power."""
    options = ("--hours", "0.04", "--pieces", "2", "--seed", "3")
    assert run(repository, tmp_path, *options) == {}
    before = (tmp_path / "work" / "trained.jsonl").read_text()
    results = run(repository, tmp_path, *options)
    account, planned = results["account"], results["account"]["planned"]
    assert results["kills"]
    assert results["pieces"] == 2
    assert (tmp_path / "work" / "trained.jsonl").read_text().startswith(before)
    assert planned
    assert account["outcomes"] == {"completed": planned}
    assert (account["planned once"], account["trained"], account["results in S3"]) == (planned, planned, planned)
    assert left_nothing(account)
    assert results["origins"]["wrong rows"] == 0


def test_each_row_of_a_training_of_many_lives_is_from_the_weights_of_its_step(tmp_path: Path, repository: Path):
    options = ("--steps", "8", "--tasks", "2", "--save-every", "3", "--changes", "--pause", "5", "20", "--seed", "1")
    results = run(repository, tmp_path, *options)
    origins, account = results["origins"], results["account"]
    assert account["steps"] == origins["steps of the last lineage"] == 8
    # A trainer that is killed while it starts logs nothing.
    assert 1 <= origins["lives"] <= 1 + sum(kind == "trainer" for _, kind in results["kills"])
    assert origins["rows"] >= account["trained"] == account["planned"] == 8 * 2 * 2
    assert (origins["wrong rows"], origins["wrong"], origins["versions of two weights"]) == (0, {}, 0)
    assert origins["gaps in the last lineage"] == 0
    assert left_nothing(account)
