"""The script that qualifies a machine for training passes on the CPU engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_the_cpu_engine_passes_all_checks(examples: Path) -> None:
    script = examples / "train_gpu" / "qualify.py"
    settings = ("serving.device=cpu", "serving.dtype=float32", "model.context_length=384")
    options = [word for setting in settings for word in ("-o", setting)]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    page = done.stdout.partition("Report this page")[2]
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.count("\nok ") == 8
    assert "of weights 0, 1: probabilities differ by" in page
