"""The examples that train, as their users run them: `make train`, a plain loop, and the check of a GPU machine."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agent_wrapper.contract import Segment, Turn, VersionSpan
from builders import load_module, run_config
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import GroupResult, StepReport
from rollouts import make_rollout, make_segment

EXAMPLES = Path(__file__).parents[2] / "examples"
QUALIFY = EXAMPLES / "train_gpu" / "qualify.py"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1200)
def test_each_step_trains_tokens_sampled_by_the_previous_steps_weights(tmp_path: Path) -> None:
    script, work = EXAMPLES / "train_arithmetic" / "train.py", tmp_path / "work"
    command = [sys.executable, script, "--tiny", "--steps", "2", "--work", work]
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


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1200)
def test_each_step_of_a_plain_loop_samples_with_the_weights_of_the_last_one(tmp_path: Path) -> None:
    script = EXAMPLES / "plain_loop" / "train.py"
    command = [sys.executable, script, "--steps", "2", "--work", tmp_path / "work"]
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


class Bigrams(torch.nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[ids])


def test_a_plain_loop_trains_no_token_without_a_logprob() -> None:
    """Tokens of a forced format have none. One NaN in the loss would make all weights NaN."""
    loop = load_module(EXAMPLES / "plain_loop" / "train.py")
    forced, free = make_segment(2, 3, logprob=None), make_segment(3, 2)
    partly = forced.model_copy(update={"logprobs": free.logprobs})  # its first sampled token has no logprob
    updated = []
    for segment in (partly, free):
        model = Bigrams()
        norm, _ = loop.update(model, torch.optim.SGD(model.parameters(), lr=1.0), [loop.Row(segment, 1.0)])
        updated.append((norm, model.table.tolist()))
    assert updated[0] == updated[1]
    assert updated[0][0] > 0
    rollouts = tuple(make_rollout(reward=reward, segments=[forced, partly]) for reward in (0.0, 1.0))
    group = GroupResult(Task("task", {}), rollouts, usable=True, planned=2)
    assert [row.segment for row in loop.make_rows(SimpleNamespace(groups=[group]))] == [partly] * 2


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_the_cpu_qualifies_for_training(tmp_path: Path) -> None:
    settings = ("serving.device=cpu", "serving.dtype=float32", "model.context_length=1024")
    options = [word for setting in settings for word in ("-o", setting)]
    options += ["--folder", str(tmp_path / "folder"), "--verl", "trainer.total_training_steps=3"]
    done = subprocess.run([sys.executable, QUALIFY, *options], capture_output=True, text=True, check=False)
    page = done.stdout.partition("Report this page")[2]
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.count("\nok ") == 9
    assert "of weights 0, 1: probabilities differ by" in page
    norms = re.findall(r"gradient norm (\S+), 32 of 32 rollouts trained, step \S+ s; gen ", page)
    assert len(norms) == 3
    assert all(float(norm) > 0 for norm in norms)
    assert (tmp_path / "folder" / "training" / "verl.log").exists()


@pytest.mark.slow  # a process that loads torch
def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, QUALIFY, "--folder", str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, f"--folder {tmp_path} exists" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(("sampled_by", "passes"), [("new", True), ("old", False)])
async def test_an_engine_that_keeps_old_weights_fails(
    sampled_by: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probability = {"old": 0.05, "new": 0.01}  # differ by less than the limit of bfloat16
    monkeypatch.syspath_prepend(QUALIFY.parent)
    qualify = importlib.import_module("qualify")
    monkeypatch.setattr(
        qualify, "reference_logprobs", lambda _, model, sequences: [[math.log(probability[model.name])] * 8] * 2
    )
    turn = Turn(start=4, end=8, finish_reason="length", weight_versions=[VersionSpan(version="1", start=4, end=8)])
    logprobs = [0.0] * 4 + [math.log(probability[sampled_by])] * 4
    segment = Segment(token_ids=[1] * 8, response_mask=[0] * 4 + [1] * 4, logprobs=logprobs, turns=[turn])
    checks = object.__new__(qualify.Qualification)
    checks._config, checks._python = run_config(serving={"dtype": "bfloat16"}), Path("python")
    checks._models = {"0": Path("old"), "1": Path("new")}
    with contextlib.nullcontext() if passes else pytest.raises(qualify.Failed, match="may be the old weights"):
        assert "from the weights before" in await checks._compare([segment] * 2)
