"""A trainer is killed at random times and restarted. Everything except the model is real."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.release
def test_a_killed_asynchronous_trainer_loses_no_rollout_and_runs_none_twice(tmp_path: Path, repository: Path):
    command = [
        *(
            sys.executable,
            str(repository / "benchmarks" / "kill_trainer.py"),
            "--asynchronous",
            "--work",
            str(tmp_path),
        ),
        *("--steps", "3", "--tasks", "2", "--kills", "3", "--save-every", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout[done.stdout.index("{") :])
    wild = counts["disturbed"]
    assert wild["planned"] == (3 + 2) * 2 * 2  # two batches ahead
    assert wild["outcomes"] == {"completed": wild["planned"]}
    assert (counts["same training rows"], wild["oldest"] <= 2) == (True, True)


@pytest.mark.slow
@pytest.mark.release
def test_a_killed_trainer_loses_no_rollout_runs_none_twice_and_leaves_none_open(tmp_path: Path, repository: Path):
    command = [
        *(sys.executable, str(repository / "benchmarks" / "kill_trainer.py")),
        *("--steps", "3", "--tasks", "4", "--kills", "4", "--seed", "1", "--work", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout[done.stdout.index("{") :])
    assert counts["same training rows"]
    wild = counts["disturbed"]
    assert wild["kills"] >= 1
    assert wild["planned"] == 3 * 4 * 2
    assert wild["outcomes"] == counts["undisturbed"]["outcomes"] == {"completed": 24}
    assert (wild["unaccounted"], wild["finished and run again"], wild["sessions open at the end"]) == (0, 0, 0)
