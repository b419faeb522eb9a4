"""The checker of row origins finds each kind of wrong row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

Answer, Row = dict[str, Any], dict[str, Any]


def logs() -> tuple[list[Answer], list[dict[str, Any]]]:
    """Return what an engine and a trainer logged: a rollout of two turns in each of two steps."""
    sampled, trained = [], [{"life": 0, "ready": 0.0}]
    for step in range(2):
        first, second = [10 + step, 2], [20 + step, 2]
        tokens, question = [1, *first, 3, *second], f"Step {step}: what is 1 + 1?"
        sampled += [
            {
                "at": 1.0,
                "weights": f"w{step}",
                "version": str(step),
                "prompt_ids": before,
                "prompt": question,
                "tokens": turn,
                "text": "the answer is 2.",
            }
            for before, turn in (([1], first), ([1, *first, 3], second))
        ]
        row = {
            "question": question,
            "answer": "2",
            "reward": 1.0,
            "tokens": tokens,
            "mask": [0, 1, 1, 0, 1, 1],
            "versions": [[str(step)], [str(step)]],
        }
        trained.append({"life": 0, "step": step, "weights": f"w{step}", "rows": [row]})
    return sampled, trained


def train_again(sampled: list[Answer], trained: list[dict[str, Any]]) -> None:
    trained[2]["rows"].append(copy.deepcopy(trained[2]["rows"][0]))


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("unknown tokens", lambda sampled, trained: sampled.pop()),
        ("another prompt", lambda sampled, trained: sampled[2].update(prompt_ids=[9])),
        ("other weights", lambda sampled, trained: sampled[2].update(weights="w0")),
        ("another version", lambda sampled, trained: sampled[2].update(version="7")),
        ("another task", lambda sampled, trained: sampled[2].update(prompt="Step 0: what is 1 + 1?")),
        ("another reward", lambda sampled, trained: trained[2]["rows"][0].update(answer="3")),
        ("trained twice", train_again),
    ],
)
def test_each_kind_of_wrong_row_is_found(load: Callable[[str], Any], kind: str, spoil: Callable[..., object]) -> None:
    check = load("row_origins").check
    sampled, trained = logs()
    found = check(sampled, trained)
    assert (found["rows"], found["turns"], found["wrong rows"], found["wrong"]) == (2, 4, 0, {})
    spoil(sampled, trained)
    found = check(sampled, trained)
    assert found["wrong rows"] >= 1
    assert [*found["wrong"]] == [kind]


def test_a_repeated_step_replaces_the_later_ones(load: Callable[[str], Any]) -> None:
    module = load("row_origins")
    steps = [{"step": step} for step in (0, 1, 2, 1, 2)]
    assert module.lineage(steps) == [0, 3, 4]


def test_a_version_that_named_two_weights_is_found(load: Callable[[str], Any]) -> None:
    sampled, trained = logs()
    sampled[0]["version"] = "1"
    assert load("row_origins").check(sampled, trained)["versions of two weights"] == 1
