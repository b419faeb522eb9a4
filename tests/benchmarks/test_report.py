"""The tables, the picture and the page of a small set of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("results.json").read_text())


def test_the_summary_compares_the_same_work_only(load, results) -> None:
    at_once, calls, added, step = load("run_all").summary(results).rows

    assert at_once == ["1,024 results at once", "CPU per rollout, ms", "1.5", "3.1 (toolkit, S3)", "3", "0.5"]
    assert calls[1:] == ["calls/s", "900", "", "1,800", "0.5"]
    assert added[1:] == ["added p50, ms", "3", "900 (toolkit)", "", ""]
    assert step == ["a step of the tiny model", "s", "10", "4 (verl's agent loop)", "", ""]


def test_the_page_has_the_machine_the_tables_and_the_commands(load, results) -> None:
    page = load("make_performance").page(results)

    assert "Measured on 2026-01-02: A Processor, 2 cores, 8 GiB, Linux 6, Python 3.11.7." in page
    assert "| collection | `python benchmarks/collection.py` | 12 |" in page
    assert "| 1,024 results at once | toolkit, S3 | 4.9 | 6 | 3.1 | 4.4 | 9 | 70 |" in page
    assert "- <rival>, 1,024 results at once: did not end within 400 s" in page
    assert "- other: ended with 1" in page
    assert "\n| total | 10.00 | 4.00 |\n" in page


def test_the_picture_has_a_bar_for_each_system_that_did_the_same_work(load, results) -> None:
    drawn = ElementTree.fromstring(load("run_all").picture(results))

    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert texts.count("1,024 results at once: toolkit, S3") == 2
    assert not any(text and text.startswith("64 results") for text in texts)


def test_the_published_page_is_that_of_the_published_figures(load) -> None:
    module = load("make_performance")
    assert module.PAGE.read_text() == module.page(json.loads(module.RESULTS.read_text())), (
        "run `python docs/make_performance.py`"
    )
