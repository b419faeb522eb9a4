"""The page and the picture of the published figures, and what has none."""

from __future__ import annotations

import json


def test_the_published_page_and_picture_are_those_of_the_published_figures(load) -> None:
    module = load("make_performance")
    results = json.loads(module.RESULTS.read_text())

    assert module.PAGE.read_text() == module.page(results), "run `python docs/make_performance.py`"
    assert module.DRAWING.read_text() == load("run_all").picture(results), "run `python docs/make_performance.py`"


def test_what_has_no_figures_is_named_with_the_reason(load) -> None:
    rival = {"system": "<rival>", "rollouts": 1024, "rate": 1e5, "tokens": 1200, "failed": "did not end within 400 s"}
    results = {"failed": {"other": "ended with 1"}, "parts": {"collection": [rival]}}

    assert load("run_all").failures(results) == [
        "other: ended with 1",
        "<rival>, 1,024 results at once: did not end within 400 s",
    ]
