"""The benchmarks run; their figures are of no interest here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1200)
def test_parts_run_with_little_work(tmp_path):
    parts = ["collection", "gateway"]
    if (ROOT / ".venv-verl").is_dir():
        parts.append("large_step")
    command = [sys.executable, str(ROOT / "benchmarks" / "run_all.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", *parts], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert (sorted(results["parts"]), results["failed"]) == (sorted(parts), {})
