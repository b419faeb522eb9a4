"""What the fault matrix counts, and the page of it and of the other experiments."""

from __future__ import annotations

import json
import re
import shutil
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
        assert any(case.name not in system.missing for system in cases.SYSTEMS.values())
        by_agents = f'"{case.name}"' in agents
        assert case.kill or by_agents or all(case.rules_for(name) for name in cases.SYSTEMS), case.name
    for system in cases.SYSTEMS.values():
        assert set(system.missing) < set(cases.BY_NAME)


ADAPTER = """
from harness import ended, failing_agents, hand_over, main, tokens_of


async def step_with_faults(work):
    for number in range(work["groups"]):
        for _ in range(work["group"]):
            agent = failing_agents(work).make(f"t{number}")
            try:
                hand_over(agent.group, await agent.run(), tokens_of(agent.proof))
            except RuntimeError:
                hand_over(agent.group, 0.0, tokens_of(agent.proof))
    ended({"as planned": 1})


main(step_with_faults)
"""


async def test_an_adapter_in_another_process_is_judged_by_what_its_agents_wrote(load, faults, monkeypatch, tmp_path):
    cases, environments = load("fault_cases"), load("rivals.environments")
    (tmp_path / "mine.py").write_text(ADAPTER)
    shutil.copy(ROOT / "benchmarks" / "rivals" / "harness.py", tmp_path)
    harness = (tmp_path / "harness.py").read_text()
    (tmp_path / "harness.py").write_text(harness.replace("draw.uniform(1.0, 7.0)", "0.0"))
    monkeypatch.setattr(environments, "_HERE", tmp_path)
    monkeypatch.setitem(cases.SYSTEMS, "mine", cases.System("mine"))

    found = {}
    for name in ("none", "agent_raises"):
        (tmp_path / name).mkdir()
        found[name] = await faults.run("mine", cases.BY_NAME[name], tmp_path / name)

    nothing = {"lost": 0, "duplicated": 0, "foreign": 0, "again": 0, "leaked": 0, "hits": 0, "ended": "yes"}
    assert nothing.items() <= found["none"].items()
    assert (found["none"]["delivered"], found["none"]["invented"]) == (32, 0)
    assert nothing.items() <= found["agent_raises"].items()
    assert (found["agent_raises"]["delivered"], found["agent_raises"]["invented"]) == (24, 8)
    assert found["none"]["missing"] == {"as planned": 1}


def test_rows_of_other_systems_are_kept(faults, tmp_path) -> None:
    rows = [{"system": system, "fault": fault} for system in ("ours", "mine") for fault in ("none", "clock")]
    (tmp_path / "faults.json").write_text(json.dumps({"seconds": 7, "results": {"rows": rows}}))

    assert faults.kept(tmp_path / "faults.json", ["mine"], ["clock"]) == (rows[:3], 7)
    assert faults.kept(tmp_path / "none.json", ["mine"], ["clock"]) == ([], 0.0)


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
