"""The tables of trainings."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def report(load) -> ModuleType:
    return load("learning_report")


def run_of(variant: str, seed: int, right: list[float], **more: Any) -> dict[str, Any]:
    return {
        "variant": variant,
        "seed": seed,
        "right": right,
        "calls": [1.0, *[3.0] * (len(right) - 1)],
        "step_s": [9.0, *[2.0] * (len(right) - 1)],
        "planned": 100,
        "sessions": 100,
        "trained": 100,
        "lost": 0,
        **more,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    lossy = {"sessions": 150, "lost": 50}
    up, down = [0.2] * 10 + [0.8] * 10, [0.2] * 10 + [0.6] * 10
    return {
        "runs": [
            *(run_of("ours", seed, up, **lossy) for seed in range(3)),
            *(run_of("lost as 0", seed, [value + 0.01 * seed for value in up], lost=40) for seed in range(3)),
            *(run_of("groups dropped", seed, down) for seed in range(2)),
        ]
    }


def test_the_end_and_the_time_of_a_run_leave_out_its_start(report, results) -> None:
    [ours] = report.outcomes(results, ["ours"]).rows

    assert ours == ["ours", "3", "0.200", "0.800 ± 0.000", "0.800 to 0.800", "0.500 ± 0.000", "2.00"]


def test_runs_are_compared_by_seed(report, results) -> None:
    as_0, dropped = report.differences(results, report.LOSS_PAIRS).rows

    assert as_0[:2] == ["lost as 0, less ours", "3"]
    assert as_0[2] == "+0.010 (-0.015 to +0.035)"  # 0, .01 and .02: 4.303 * 0.01 / sqrt(3)
    assert dropped[1:] == ["2", "-0.200 (-0.200 to -0.200)", "-0.100 (-0.100 to -0.100)"]


def test_losses_add_up(report, results) -> None:
    ours, as_0, dropped = report.losses(results).rows

    assert ours == ["ours", "300", "450", "150", "300", "33%", "2.33 -> 3"]
    assert as_0[1:6] == ["300", "300", "120", "300", "40%"]
    assert dropped[3] == "0"


def test_a_game_is_compared_at_its_beginning_and_end_over_all_seeds(report) -> None:
    def game(seed: int, *rewards: float) -> dict[str, Any]:
        constant = {"rollouts": 32, "won": 0.0, "segments": 2.0, "tool_calls": 0.0, "sampled_tokens": 20.0}
        constant |= {"prob_diff": 1e-6, "seconds": 8.0}
        steps = [{**constant, "reward": reward, "turns": 4.0 + at} for at, reward in enumerate(rewards)]
        return {"name": "lake", "seed": seed, "steps": steps}

    results = {"runs": [game(0, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8), game(1, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3)]}
    [cells] = report.learned(results).rows
    gain = "+0.100 (-3.712 to +3.912)"  # +.4 and -.2: 12.706 * 0.424 / sqrt(2)
    assert cells == ["FrozenLake-v0", "2", "6", "0.4 -> 0.5", "0.3 -> 0.7, 0.5 -> 0.3", gain, "0"]
    [cells] = report.in_play(results).rows
    assert cells[1:4] == ["384", "5 -> 8", "2"]
