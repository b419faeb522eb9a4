"""The values of a training in TensorBoard and in wandb, whose packages verl's environment has."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.training.loggers import open_loggers


def settings(folder: Path, *names: str) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "run_id": "run",
            "model": {"path": "m"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "process", "command": ["agent"]},
            "training_service": {"base_model": "tiny", "loggers": names},
            "output_dir": str(folder),
        }
    )


async def test_tensorboard_shows_the_curve_of_a_resumed_training(tmp_path: Path) -> None:
    for step, reward in ((1, 0.25), (2, 0.5)):
        async with open_loggers(settings(tmp_path, "tensorboard")) as send:
            send(step, {"reward": reward})
            send(step, {"evaluation/reward": reward})
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("reward", "evaluation/reward"):
        values = [(each.step, each.tensor_proto.float_val[0]) for each in found.Tensors(name)]
        assert values == [(1, 0.25), (2, 0.5)]


async def test_wandb_gets_the_values_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    async with open_loggers(settings(tmp_path, "wandb")) as send:
        send(1, {"reward": 0.25})
        send(2, {"reward": 0.5})
    assert [*(tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert "reward 0.5" in capfd.readouterr().err


async def test_a_logger_that_fails_costs_its_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def __init__(self, folder: str) -> None:
            pass

        def add_scalar(self, *value: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr("tensorboard.summary.Writer", Full)
    with caplog.at_level(logging.WARNING):
        async with open_loggers(settings(tmp_path, "tensorboard")) as send:
            send(1, {"reward": 0.25})
    assert "tensorboard got no values of step 1" in caplog.text


async def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="the package wandb is missing"):
        async with open_loggers(settings(tmp_path, "wandb")):
            pass
