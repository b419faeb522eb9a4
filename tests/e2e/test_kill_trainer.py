"""A trainer killed at random moments and started again, with everything but the model real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_nothing_is_lost_run_twice_or_left_open(tmp_path: Path, repository: Path):
    command = [
        *(sys.executable, str(repository / "benchmarks" / "kill_trainer.py")),
        *("--steps", "3", "--tasks", "4", "--kills", "4", "--seed", "1", "--work", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert told["same training rows"]
    wild = told["disturbed"]
    assert wild["kills"] >= 1
    assert wild["planned"] == 3 * 4 * 2
    assert wild["outcomes"] == told["undisturbed"]["outcomes"] == {"completed": 24}
    assert (wild["unaccounted"], wild["finished and run again"], wild["sessions open at the end"]) == (0, 0, 0)
