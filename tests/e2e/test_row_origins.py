"""A checker that reads the logs of engine and trainer alone finds rows from weights that were abandoned."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_backend.workbench.local.cloud import LocalCloud

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("naming", "wrong"), [("trainer", 0), ("backend", 0), ("step", 4)])
async def test_rows_of_weights_that_were_trained_again_are_found(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, naming: str, wrong: int
) -> None:
    """Two trainers begin at the first step, so the second trains the weights of the second step again. Named by the
    step alone, they have the name of the first trainer's, and its rollouts are wrongly reused."""
    monkeypatch.syspath_prepend(repository / "benchmarks")
    trainer, origins = (importlib.import_module(name) for name in ("policy_trainer", "row_origins"))
    kill_trainer: Any = importlib.import_module("kill_trainer")
    model = trainer.prepare(tmp_path)
    agent = repository / "benchmarks" / "two_turns_agent.py"
    async with LocalCloud(agent, run_dir=tmp_path / "cloud") as cloud:
        environ = cloud.environ | trainer.engine_environment(tmp_path / "sampled.jsonl", (0.0, 0.0))
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        kill_trainer.write_settings(
            tmp_path,
            {"kind": "policy_trainer.EngineFactory"},
            cloud,
            model={"path": str(model), "name": "small", "renderer": "chatml", "context_length": 4096},
        )
        for number in range(2):
            await trainer.train(trainer.Life(number, str(tmp_path), 2, sys.maxsize, naming, save_every=9, tasks=2))
    found = origins.check_folder(tmp_path)
    assert (found["lives"], found["steps trained"], found["rows"], found["turns"]) == (2, 4, 16, 32)
    assert found["sampled before a kill"] == {"trainer": 4, "backend": 0, "step": 8}[naming]
    assert found["wrong rows"] == wrong, found["wrong"]
    assert [*found["wrong"]] == (["other weights"] if wrong else [])
    assert found["versions of two weights"] == 0
