"""The script that qualifies a machine for training passes on the CPU: the engine, and two steps of verl's trainer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpu" / "qualify.py"


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_the_cpu_passes_all_checks(tmp_path: Path) -> None:
    settings = ("serving.device=cpu", "serving.dtype=float32", "model.context_length=1024")
    options = [word for setting in settings for word in ("-o", setting)]
    options += ["--folder", str(tmp_path / "folder"), "--verl", "trainer.total_training_steps=3"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    page = done.stdout.partition("Report this page")[2]
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.count("\nok ") == 9
    assert "of weights 0, 1: probabilities differ by" in page
    norms = re.findall(r"gradient norm (\S+), 32 of 32 rollouts trained, step \S+ s; gen ", page)
    assert len(norms) == 3
    assert all(float(norm) > 0 for norm in norms)
    assert (tmp_path / "folder" / "training" / "verl.log").exists()


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--folder", str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, f"--folder {tmp_path} exists" in done.stderr) == (2, True), done.stderr
