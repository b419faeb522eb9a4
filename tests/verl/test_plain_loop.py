"""The example `plain_loop`. Here, because it needs torch and transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_loop" / "train.py"


def test_each_step_samples_with_the_weights_of_the_last_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "2", "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d", line)]
    assert [(step, versions) for step, _, _, _, versions, *_ in steps] == [("1", "0"), ("2", "1")]
    for _, _, probability_difference, gradient_norm, *_ in steps:
        assert float(probability_difference) < 1e-4  # the engine's weights are the trainer's
        assert float(gradient_norm) > 0
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("runs/*/weights.json"))
    assert record["version"] == 2
    assert [folder.name for folder in Path(record["folder"]).parent.iterdir()] == ["2"]  # older ones are deleted
