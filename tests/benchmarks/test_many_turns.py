"""The weak players, the tables, the picture and the page of the trainings of many turns."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


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


def test_the_weak_player_reads_the_last_cells(players) -> None:
    before, now = TURN.format("w# a# sH dH"), TURN.format("wH aH s. dH")
    moves = [players.weak_lake(f"{before}{i}{now}") for i in range(1000)]
    assert set(moves) == {"[w]", "[a]", "[s]", "[d]"}
    assert 480 < moves.count("[s]") < 620, "four in ten are down for sure, the others at random"


def test_the_weak_player_calls_the_tool_or_guesses(players) -> None:
    replies = [players.weak_sums(TURN.format(f"Calculate {i} + 2.")) for i in range(1000)]
    calls = Counter(reply for reply in replies if "tool_call" in reply)
    assert 650 < calls.total() < 750
    assert len(calls) == 3, "any operator"
    assert max(calls.values()) < 300
    assert all(reply.isdigit() for reply in replies if "tool_call" not in reply)
    assert players.weak_sums("<tool_response>\n-4\n</tool_response>") == "done"


def test_equal_prompts_get_equal_moves(players) -> None:
    prompt = TURN.format("w# a# s. d.")
    assert players.weak_lake(prompt) == players.weak_lake(prompt)


def test_beginning_and_end_are_compared_over_all_seeds(report) -> None:
    results = made(
        {"name": "lake", "steps": steps(0.2, 0.3, 0.4, 0.6, 0.7, 0.8)},
        {"name": "lake", "steps": steps(0.5, 0.5, 0.5, 0.3, 0.3, 0.3)},
    )
    [cells] = report.learned(results).rows
    assert cells == ["FrozenLake-v0", "2", "6", "0.4 -> 0.5", "0.30 to 0.70", "1 of 2", "0"]
    [cells] = report.in_play(results).rows
    assert cells[1:4] == ["384", "5 -> 8", "2"]


def test_the_games_that_are_played_best_come_first(report) -> None:
    row = {"best": 1.0, "groups": 2, "with_spread": 1, "turns": 3.0, "invalid": 0.5}
    rows = [
        {**row, "game": "Worse-v0", "reward": 0.2},
        {**row, "game": "Better-v0", "reward": 0.3},
    ]
    table = report.games(made({"name": "games", "games": rows}))
    assert [cells[0] for cells in table.rows] == ["Better-v0", "Worse-v0"]
    assert table.rows[0][-1] == "50%"


def test_the_picture_has_a_line_and_a_band_for_each_training(load, report) -> None:
    results = made({"name": "lake", "steps": steps(0.0, 1.0)}, {"name": "sums", "steps": steps(0.5, 0.5, 0.5)})
    root = ElementTree.fromstring(report.picture(results))
    assert [len([*root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")]) for tag in ("polyline", "polygon")] == [2, 2]
    assert load("curves").smoothed([0.0, 1.0, 0.5], 1) == [0.5, 0.5, 0.75]
