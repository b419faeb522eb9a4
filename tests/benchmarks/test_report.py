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


def test_parts_that_are_measured_again_replace_their_earlier_figures(load) -> None:
    def measured(date: str, parts: dict[str, list[object]], *failed: str) -> dict[str, object]:
        names = [*parts, *failed]
        kinds = {kind: dict.fromkeys(names, date) for kind in ("commands", "seconds", "dates", "machines")}
        return {"parts": parts, "failed": dict.fromkeys(failed, "ended with 1"), **kinds}

    before = measured("monday", {"collection": [1], "gateway": [2]}, "wrapper")
    found = load("make_performance").merged(before, measured("tuesday", {"wrapper": [3]}, "gateway"))

    assert found["parts"] == {"collection": [1], "wrapper": [3]}
    assert found["failed"] == {"gateway": "ended with 1"}
    assert found["dates"] == {"collection": "monday", "wrapper": "tuesday", "gateway": "tuesday"} == found["machines"]


def test_a_learning_run_that_was_cut_off_makes_a_section(load) -> None:
    run = {"variant": "ours", "seed": 0, "right": [0.25, 0.5], "step_s": [9.0, 2.0], "parts_s": {"gen": 1.5}}
    run |= {"tokens": [100, 300], "prob_diff": [1e-3, 2e-3], "started": 1, "busy": None, "mib": 5000}
    settings = {"hidden": 512, "layers": 8, "digits": 4, "note": 8, "transcripts": 2048, "looks": 0.6, "steps": 30}
    settings |= {"prompts": 32, "group": 8, "response_tokens": 768}
    results = {"device": "<GPU>", "versions": {"verl": "0.9.1"}, "settings": settings, "runs": [run]}
    about = {"date": "<date>", "command": "<command>", "seconds": 60, "machine": load("common").machine()}
    module = load("make_results")

    page = module.page({"gpu_learning": {**about, "results": results}})
    assert "<GPU>, verl 0.9.1." in page
    assert "| ours | 2 | 0.375 | 2.0e-03 | 2.0 | 150 |  | 5,000 |  |  | 1 |" in page
    [drawing] = module.pictures({"gpu_learning": {"results": results}}).values()
    assert "ours (1 seeds)" in drawing
    assert "verl" not in drawing


def test_each_size_of_a_large_step_has_a_column(load) -> None:
    rows = [{"sessions": n, "turns": 40, "refused": 0, "cpu_ms": 1.5} for n in (1024, 4096)]
    table = load("run_all").table({"parts": {"large_step": rows}}, "large_step")

    assert table.header == ("figure", "1,024 sessions, 40 turns", "4,096 sessions, 40 turns")
    assert ["calls refused", "0", "0"] in table.rows
