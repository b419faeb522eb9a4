"""The tables of trainings."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def report(load) -> ModuleType:
    return load("learning_report")


def test_runs_are_compared_by_seed(report) -> None:
    def runs(variant: str, *ends: float) -> list[dict[str, Any]]:
        return [{"variant": variant, "seed": i, "right": [0.2] * 10 + [end] * 10} for i, end in enumerate(ends)]

    compared = [*runs("ours", 0.8, 0.8, 0.8), *runs("lost as 0", 0.8, 0.81, 0.82), *runs("groups dropped", 0.6, 0.6)]
    as_0, dropped = report.differences({"runs": compared}, "ours").rows

    assert as_0[:2] == ["lost as 0, less ours", "3"]
    assert as_0[2] == "+0.010 (-0.015 to +0.035)"  # 0, .01 and .02: 4.303 * 0.01 / sqrt(3)
    assert dropped[1:] == ["2", "-0.200 (-0.200 to -0.200)", "-0.100 (-0.100 to -0.100)"]


def test_a_training_is_compared_at_its_beginning_and_end_over_all_seeds(report) -> None:
    def run(seed: int, *rewards: float) -> dict[str, Any]:
        constant = {"rollouts": 32, "won": 0.0, "segments": 2.0, "tool_calls": 0.0, "sampled_tokens": 20.0}
        constant |= {"prob_diff": 1e-6, "seconds": 8.0}
        steps = [{**constant, "reward": reward, "turns": 4.0 + at} for at, reward in enumerate(rewards)]
        return {"name": "rooms", "seed": seed, "steps": steps}

    results = {"runs": [run(0, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8), run(1, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3)]}
    [cells] = report.learned(results).rows
    gain = "+0.100 (-3.712 to +3.912)"  # +.4 and -.2: 12.706 * 0.424 / sqrt(2)
    assert cells == ["rooms with a tool", "2", "6", "0.4 -> 0.5", "0.3 -> 0.7, 0.5 -> 0.3", gain, "0"]
    [cells] = report.in_play(results).rows
    assert cells[1:4] == ["384", "5 -> 8", "2"]
