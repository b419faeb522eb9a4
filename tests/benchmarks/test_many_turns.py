"""The weak players, the tables, the picture and the page of the trainings of many turns."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def players(load) -> ModuleType:
    return load("weak_players")


@pytest.fixture
def report(load) -> ModuleType:
    return load("many_turns_report")


def steps(*rewards: float) -> list[dict[str, float]]:
    constant = {"rollouts": 32, "won": 0.0, "segments": 2.0, "tool_calls": 0.0, "sampled_tokens": 20.0}
    return [
        {**constant, "reward": reward, "turns": 4.0 + number, "prob_diff": 1e-6, "seconds": 8.0}
        for number, reward in enumerate(rewards)
    ]


def made(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": [{"seed": seed, **run} for seed, run in enumerate(runs)]}


def test_beginning_and_end_are_compared_over_all_seeds(report) -> None:
    results = made(
        {"name": "lake", "steps": steps(0.2, 0.3, 0.4, 0.6, 0.7, 0.8)},
        {"name": "lake", "steps": steps(0.5, 0.5, 0.5, 0.3, 0.3, 0.3)},
    )
    [cells] = report.learned(results).rows
    assert cells == ["FrozenLake-v0", "2", "6", "0.4 -> 0.5", "0.30 to 0.70", "1 of 2", "0"]
    [cells] = report.in_play(results).rows
    assert cells[1:4] == ["384", "5 -> 8", "2"]
