"""`rollout replay`: the rows of a live step, rebuilt from its folder."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from agent_wrapper.contract import Rollout
from builders import refused
from rollout_backend import cli
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.views.replay import rollout_digest, rows_as_parquet, step_digest
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine


@pytest.fixture(scope="module")
def run(storage, agent_server, tmp_path_factory) -> tuple[Path, StepResult]:
    """Run an oversampled step with the scripted engine; return its folder and its result."""
    questions = {"right": "What is 3 + 4?", "wrong": "What is 1 + 6?"}
    tasks = [Task(name, {"question": text, "answer": "7"}) for name, text in questions.items()]
    base = {
        "run_id": "replayed",
        "model": {"path": str(BYTE_MODEL), "renderer": "chatml"},
        "storage": {"bucket": storage.bucket},
        "aws": {"region": storage.region, "endpoint_url": storage.endpoint_url},
        "runtime": {"kind": "http", "url": agent_server},
        "output_dir": str(tmp_path_factory.mktemp("runs")),
        "queue": {"wait_s": 1},
        "group": {"size": 2, "oversample": 1},
    }

    async def collect(config: RolloutConfig) -> StepResult:
        async with RolloutManager(config) as manager:
            return await manager.collect(tasks)

    with pytest.MonkeyPatch.context() as patch, ScriptedEngine(_reply) as engine:
        for name, value in storage.environ.items():
            patch.setenv(name, value)
        config = load_config(base={**base, "serving": {"kind": "external", "urls": [engine.url]}})
        return config.run_dir, asyncio.run(collect(config))


@pytest.fixture
def live(run: tuple[Path, StepResult], tmp_path: Path) -> tuple[Path, StepResult]:
    """Return the run with a copy of its folder and of the secrets next to it."""
    folder, result = run
    shutil.copytree(folder.parent, tmp_path / "runs")
    return tmp_path / "runs" / folder.name, result


def _reply(prompt: str) -> str:
    return "It is 7." if "3 + 4" in prompt else "I do not know."


def trained(result: StepResult) -> Sequence[Rollout]:
    return [rollout for group in result.groups if group.usable for rollout in group.rollouts]


def test_the_rows_of_a_live_step_are_rebuilt_byte_for_byte(rollout, live, tmp_path):
    folder, result = live
    rollouts = trained(result)
    assert len(rollouts) == 4
    code, output = rollout("replay", folder)
    assert code == 0, output
    for each in rollouts:
        assert f"{each.rollout_id}: {rollout_digest(each)}" in output
    assert f"digest of the step: {step_digest(rollouts)}" in output
    assert "4 rollouts, 4 rows" in output
    assert "seals verified with the run's secret" in output

    out = tmp_path / "new" / "rows.parquet"
    assert rollout("replay", folder, "--step", 0, "--out", out)[0] == 0
    assert out.read_bytes() == rows_as_parquet(rollouts)
    rows = pyarrow.parquet.read_table(out)
    segments = [segment for each in rollouts for segment in each.segments]
    for name, dtype in (("token_ids", np.int32), ("response_mask", np.uint8), ("logprobs", np.float32)):
        rebuilt = [cell.values.to_numpy(zero_copy_only=False) for cell in rows[name]]
        assert [each.dtype for each in rebuilt] == [dtype] * len(segments)
        assert [each.tobytes() for each in rebuilt] == [getattr(segment, name).tobytes() for segment in segments]
    assert rows["reward"].to_pylist() == [each.reward for each in rollouts]
    assert rows["rollout_id"].to_pylist() == [each.rollout_id for each in rollouts]
    spans = [[asdict(span) for turn in segment.turns for span in turn.weight_versions] for segment in segments]
    assert rows["weight_versions"].to_pylist() == spans


def test_a_result_that_fails_its_check_is_named(rollout, live, tmp_path):
    folder, result = live
    first, second, third, fourth = trained(result)
    stored = folder / "rollouts" / "00000000"
    [segment] = first.segments
    token_ids = segment.token_ids[:]
    token_ids[0] += 1
    altered = first.model_copy(update={"segments": (segment.model_copy(update={"token_ids": token_ids}),)})
    rewarded = second.model_copy(update={"reward": 0.5})
    (stored / first.rollout_id).write_bytes(altered.encode())
    (stored / second.rollout_id).write_bytes(rewarded.encode())
    (stored / third.rollout_id).write_bytes(b"nothing")
    (folder.parent / ".secrets" / folder.name).unlink()  # a folder that was shared
    out = tmp_path / "rows.parquet"
    code, output = rollout("replay", folder, "--out", out)
    assert code == 1
    assert f"{first.rollout_id}: seal: is of other segments" in output
    assert f"{second.rollout_id}: result: is not the one that the record summarizes" in output
    assert f"{third.rollout_id}: object:" in output
    assert "3 stored results failed their check" in output
    assert not out.exists()
    found = json.loads(CliRunner().invoke(cli.app, ["replay", str(folder), "--json"]).stdout)
    assert found["digest"] is None
    assert found["rollouts"] == {fourth.rollout_id: rollout_digest(fourth)}
    assert "signatures were not verified" in found["seals"]


def test_unusable_input_is_refused(rollout, live, tmp_path):
    folder, _ = live
    for arguments, message in (
        (("none",), "there is no run 'none'"),
        ((folder, "--step", 3), "has no records: it has those of step 0"),
        ((folder, "--out", tmp_path / "rows.npz"), "must be a .parquet file"),
        ((tmp_path,), "has no records"),
    ):
        refused(rollout("replay", *arguments), message)
    (folder / "steps" / "00000000.json").unlink()
    refused(rollout("replay", folder), "has no report, because it was interrupted or failed")
