"""verl's trainer learns the same through the backend as with its own agent loop, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(3600)]


def test_a_training_with_killed_sessions_is_identical_to_one_with_verls_own_loop(
    tmp_path: Path, repository: Path
) -> None:
    written = tmp_path / "identity.json"
    command = [sys.executable, str(repository / "benchmarks" / "identity.py"), "--json", str(written)]
    chosen = ["--trainers", "v1", "--variants", "ours, killed", "--steps", "3", "--runs", str(tmp_path / "runs")]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    [found] = json.loads(written.read_text())["results"]["comparisons"]
    assert found["killed"] > 0
    assert found["attempts"] > found["planned"] == found["trainable"] == found["rows"] == 192
    assert found["tokens"] > found["rows"]
    assert found["weights_trained"] > 0.9 * found["weights"]
    assert (found["differences"], found["differing_weights"]) == ([], 0)
