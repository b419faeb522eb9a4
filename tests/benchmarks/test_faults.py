"""What the fault matrix counts, and the page of it and of the other experiments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def faults(load) -> ModuleType:
    return load("faults")


def trained(group: str, proof: int, reward: float) -> dict[str, object]:
    return {"group": group, "reward": reward, "tokens": [8 * proof]}


def test_each_rollout_is_counted_once(faults) -> None:
    truths = [
        faults.Truth(1, "a", 0.5, True),
        faults.Truth(2, "a", 1.0, True),
        faults.Truth(3, "a", 0.25, True),
        faults.Truth(4, "a", 1.0, False),  # failed
        faults.Truth(5, "b", 1.0, True),
        faults.Truth(6, "b", 1.0, True),
    ]
    rollouts = [
        trained("a", 1, 0.5),
        trained("a", 1, 0.5),  # again
        trained("a", 2, 0.0),  # not its reward
        trained("a", 4, 0.0),  # has none
        trained("b", 3, 0.25),  # of another group
        trained("b", 99, 1.0),  # of no session
    ]

    found = faults.count(truths, rollouts)

    assert found == {"delivered": 1, "lost": 0, "duplicated": 1, "invented": 2, "foreign": 2, "again": 0}
    assert faults.count(truths, [])["lost"] == 5


def test_each_case_says_what_fails_or_why_it_cannot(load) -> None:
    cases = load("fault_cases")
    agents = "".join((ROOT / "benchmarks" / name).read_text() for name in ("faulty_agents.py", "rivals/harness.py"))

    assert len(cases.CASES) > 20
    for case in cases.CASES[1:]:
        met = [system for system in cases.SYSTEMS if system not in case.missing]
        assert met
        by_agents = f'"{case.name}"' in agents
        assert case.kill or by_agents or set(case.rules) == set(met), case.name


def test_the_page_is_that_of_its_results(load) -> None:
    module = load("make_results")
    sections = json.loads(module.RESULTS.read_text())

    page = module.page(sections)
    assert module.PAGE.read_text() == page, "run `python docs/make_results.py`"
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    for name, drawing in module.pictures(sections).items():
        ElementTree.fromstring(drawing)
        assert (module.HERE / name).is_file()
        assert f"]({name})" in page
