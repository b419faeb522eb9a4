"""The tables of trainings."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from builders import until
from rollout_backend.results.archive import RunArchive
from run_folders import make_step


@pytest.fixture
def report(load) -> ModuleType:
    return load("learning_report")


def test_runs_are_compared_by_seed(report) -> None:
    def runs(variant: str, *ends: float) -> list[dict[str, Any]]:
        return [{"variant": variant, "seed": i, "right": [0.2] * 10 + [end] * 10} for i, end in enumerate(ends)]

    compared = [*runs("ours", 0.8, 0.8, 0.8), *runs("lost as 0", 0.8, 0.81, 0.82), *runs("groups dropped", 0.6, 0.6)]
    as_0, dropped = report.differences({"runs": compared}, report.LOSS_PAIRS).rows

    assert as_0[:2] == ["lost as 0, less ours", "3"]
    assert as_0[2] == "+0.010 (-0.015 to +0.035)"  # 0, .01 and .02: 4.303 * 0.01 / sqrt(3)
    assert dropped[1:] == ["2", "-0.200 (-0.200 to -0.200)", "-0.100 (-0.100 to -0.100)"]


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


def test_the_cpu_of_a_step_is_shown_by_process(report, load, tmp_path) -> None:
    spent = {"verl": {"engine": 1.0}, "ours": {"engine": 1.5, "gateway": 0.25}}
    runs = [{"variant": variant, "seed": 0, "cpu_s": cpu} for variant, cpu in spent.items()]
    assert report.cpu({"runs": runs}).rows == [
        ["engine", "1.00", "1.50"],
        ["gateway", "0.00", "0.25"],
        ["all", "1.00", "1.75"],
    ]
    metrics = tmp_path / "metrics.jsonl"
    with load("training_step").CpuOfSteps(metrics) as cpu:
        for step in range(3):
            metrics.write_text("{}\n" * (step + 1))
            until(lambda step=step: len(cpu.steps) >= step)
    [own, _] = [sum(step.values()) for step in cpu.steps]
    assert own >= 0


def test_the_generation_of_a_step_is_split_at_what_its_run_recorded(load, tmp_path) -> None:
    curves = load("learning_curves")
    result = make_step({"task.0": 1.0}, seconds=5.0, began_at=0.0, closing_s=1.0)
    archive = RunArchive(tmp_path / "run")
    archive.write_records(0, result.records)
    archive.write_report(result.report)
    archive.write_rollout(result.rollouts[0], result.rollouts[0].encode())
    archive.close()
    (tmp_path / ".secrets").mkdir()  # beside the runs
    [parts] = curves.timelines(tmp_path, [6.0])
    first, *_, closing, verl = (parts[name] for name in curves.TIMELINE)
    assert (first, closing, verl) == (result.report.until_invoke_s, pytest.approx(1.0), pytest.approx(1.0))
    assert curves.medians([parts, {}, {**parts, "model_s": 9.0}])["model_s"] == parts["model_s"]
