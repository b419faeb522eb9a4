"""The example behind `make train` and `make train-smoke`, checked in each step."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_backend.results.step_report import StepReport

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_arithmetic" / "train.py"


def test_each_step_trains_tokens_sampled_by_the_previous_steps_weights(tmp_path: Path) -> None:
    work = tmp_path / "work"
    command = [sys.executable, str(SCRIPT), "--tiny", "--steps", "2", "--work", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((work / "curve.csv").read_text().splitlines()))
    assert [(row["step"], row["weight_version"]) for row in rows] == [("1", "0"), ("2", "1")]
    for row in rows:
        assert float(row["rollout_probs_diff_max"]) < 1e-4
        assert float(row["grad_norm"]) > 0
        assert (float(row["rollouts"]), float(row["left_out"]), float(row["staleness"])) == (64, 0, 0)
    assert "rollout_probs_diff_max" in done.stdout
    log = (work / "verl.log").read_text()
    assert "Traceback" not in log, "verl did not end cleanly"
    assert "gateway died" not in log, "the end of a run reads like a failure"
    assert (work / "curve.png").stat().st_size > 0
    reports = [StepReport.model_validate_json(file.read_text()) for file in tmp_path.glob("runs/*/steps/*.json")]
    assert len(reports) == 2
    for report in reports:
        assert report.balanced
        assert report.sessions_open == 0
        assert report.planned == report.trainable == 64
