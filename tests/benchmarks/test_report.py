"""The tables, the picture and the page of a small set of results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("results.json").read_text())


def test_the_summary_compares_the_same_work_only(load, results) -> None:
    rows = load("report").summary(results).rows

    at_once = [row for row in rows if row[0] == "1,024 results at once"]
    assert at_once[0] == ["1,024 results at once", "p50, s", "0.05", "4.9 (toolkit, S3)", "0.04", "1.25"]
    assert len(at_once) == 3
    assert not [row for row in rows if row[0].startswith("64 results")]
    assert ["calls with 2,048 tokens without a pause, 32 in flight", "calls/s", "900", "", "1,800", "0.5"] in rows
    [added] = [row for row in rows if row[1] == "added p99, ms"]
    assert added[2:] == ["40", "4,000 (toolkit)", "", ""]
    assert ["256 rollouts, 4.0 M tokens", "DataProto, M tokens/s", "90", "", "180", "0.5"] in rows
    assert ["a container", "import: CPU, ms", "198", "220 (toolkit)", "180", "1.1"] in rows
    assert ["a container with presigned URLs", "first rollout: return to stored, ms", "50", "", "", ""] in rows
    assert ["a step of the tiny model", "of it rollouts, s", "9", "3 (verl's agent loop)", "", ""] in rows


def test_the_page_has_the_machine_the_tables_and_the_commands(load, results) -> None:
    page = load("make_performance").page(results)

    assert "Measured on 2026-01-02: A Processor, 2 cores, 8 GiB, Linux 6, Python 3.11.7." in page
    assert "| collection | `python benchmarks/collection.py` | 12 |" in page
    assert "- PutObject: 7,000 calls/s on one core, 30 µs of CPU per call" in page
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1
