"""What the learning curves count, and their tables and pictures."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from xml.etree import ElementTree

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


def test_one_pair_has_no_interval(report) -> None:
    assert report.interval([0.5]) is None


def test_losses_add_up(report, results) -> None:
    table = report.losses(results)
    faults, as_0 = ({row[0]: row[at] for row in table.rows} for at in (2, 3))

    assert table.header == ("over all seeds", "ours", "ours, faults", "faults as 0")
    assert faults["rollouts trained with the agent's reward"] == "285"
    assert (faults["rollouts left out"], faults["attempts repeated after a loss"]) == ("15", "30")
    assert faults["killed, late or throttled"] == "18.8 %"  # 22 of 117
    assert as_0["rollouts trained with an invented 0"] == "30"
    assert as_0["rollouts trained with the agent's reward"] == "170"


def test_only_parts_that_take_time_have_a_line(report, results) -> None:
    assert report.parts(results, report.PATH).rows == [["`gen`", "1.50", "1.50"], ["rest", "0.50", "0.50"]]


def test_a_picture_has_a_line_and_a_band_for_each_variant(report, results) -> None:
    picture = ElementTree.fromstring(report.picture(results, report.LOSSES))

    names = [element.tag.rpartition("}")[2] for element in picture]
    assert (names.count("polyline"), names.count("polygon")) == (3, 3)
    ElementTree.fromstring(report.picture({"runs": []}, report.PATH))


def test_a_step_counts_the_first_sessions_of_its_rollouts(load, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = load("learning_curves")
    record = load("emulated_aws.wrapped_agents").SessionRecord
    records = [
        record(200, "b.0", 1, True, 3, ""),
        record(100, "a.0", 1, False, 3, "killed"),
        record(100, "a.0", 2, True, 3, ""),
        record(100, "a.1", 1, True, 2, ""),
    ]

    assert curves.right_by_step(records) == [0.5, 1.0]
    assert curves.accounts(records, [])["lost"] == {"killed": 1}


def test_longer_rollouts_are_lost_more_often(load) -> None:
    rates = load("emulated_aws.wrapped_agents").LossRates(killed=0.04, late=0.02)

    lots = {tokens: [rates.draw(f"{i}", tokens) for i in range(4000)] for tokens in (1, 3)}

    assert lots[3].count("killed") / 4000 == pytest.approx(0.12, abs=0.02)
    assert lots[3].count("late") / 4000 == pytest.approx(0.06, abs=0.02)
    assert lots[1].count("killed") < lots[3].count("killed") / 2
    assert rates.draw("7", 3) == rates.draw("7", 3)
