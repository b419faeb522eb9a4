"""What the learning curves count, and their tables and pictures."""

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
        "step_s": [9.0, *[2.0] * (len(right) - 1)],
        "parts_s": {"gen": 1.5, "ref": 0.0, "rest": 0.5},
        "planned": 100,
        "sessions": 100,
        "attempts": 100,
        "trainable": 100,
        "throttled": 0,
        "lost": {},
        "unbalanced_steps": 0,
        **more,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    lossy = {"sessions": 110, "attempts": 110, "trainable": 95, "throttled": 7, "lost": {"killed": 10, "late": 5}}
    as_0 = {"throttled": 5, "lost": {"killed": 10, "late": 5}}
    up, down = [0.2] * 10 + [0.8] * 10, [0.2] * 10 + [0.6] * 10
    return {
        "runs": [
            *(run_of("verl", seed, up) for seed in range(3)),
            *(run_of("ours", seed, up) for seed in range(3)),
            *(run_of("ours, faults", seed, [value + 0.01 * seed for value in up], **lossy) for seed in range(3)),
            *(run_of("faults as 0", seed, down, **as_0) for seed in range(2)),
        ]
    }


def test_the_end_and_the_time_of_a_run_leave_out_its_start(report, results) -> None:
    [verl, ours] = report.outcomes(results, report.PATH).rows

    assert verl == ["verl", "3", "0.200", "0.800 ± 0.000", "0.800 to 0.800", "0.500 ± 0.000", "2.00"]
    assert ours[1:] == verl[1:]


def test_runs_are_compared_by_seed(report, results) -> None:
    faults, as_0, both = report.differences(results, report.LOSS_PAIRS).rows

    assert faults[:2] == ["ours, faults, less ours", "3"]
    assert faults[2] == "+0.010 (-0.015 to +0.035)"  # 0, .01 and .02: 4.303 * 0.01 / sqrt(3)
    assert as_0[1:] == ["2", "-0.200 (-0.200 to -0.200)", "-0.100 (-0.100 to -0.100)"]
    assert both[1] == "2"


def test_losses_add_up(report, results) -> None:
    table = report.losses(results)
    faults, as_0 = ({row[0]: row[at] for row in table.rows} for at in (2, 3))

    assert table.header == ("over all seeds", "ours", "ours, faults", "faults as 0")
    assert faults["rollouts trained with the agent's reward"] == "285"
    assert (faults["rollouts left out"], faults["attempts repeated after a loss"]) == ("15", "30")
    assert faults["killed, late or throttled"] == "18.8 %"  # 22 of 117
    assert as_0["rollouts trained with an invented 0"] == "30"
    assert as_0["rollouts trained with the agent's reward"] == "170"
