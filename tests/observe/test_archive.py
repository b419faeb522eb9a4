"""A run's folder: what was kept is found, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_wrapper.contract import Rollout
from rollout_backend.ledger import Ledger, PlannedRollout
from rollout_backend.observe.archive import RunArchive
from rollout_backend.report import StepReport, make_report


@pytest.fixture
def archive(tmp_path: Path) -> RunArchive:
    return RunArchive(tmp_path / "runs" / "a-run")


def report(step: int, planned: int = 0) -> StepReport:
    ledger = Ledger(step)
    ledger.plan(PlannedRollout(f"task.{i}", "task") for i in range(planned))
    return make_report("run", ledger, [], [], [], [], refused=0, seconds=1.0, deadline_reached=False)


def test_a_rollout_is_kept_whole_and_found_by_its_id(archive, make_rollout):
    rollout = make_rollout("task-a.0", step=7, extras={"x": [1]})
    archive.keep(rollout)
    [path] = archive.find("task-a.0")
    assert path == archive.run_dir / "rollouts" / "00000007" / "task-a.0"
    assert Rollout.decode(path.read_bytes()).encode() == rollout.encode()


def test_of_several_steps_the_oldest_comes_first(archive, make_rollout):
    for step in (10, 9, 100):
        archive.keep(make_rollout("task-a.0", step=step))
    assert [path.parent.name for path in archive.find("task-a.0")] == ["00000009", "00000010", "00000100"]


@pytest.mark.parametrize(
    "wanted", ["task-a", "task-a.", "*", "task-a.[0]", "task-a.0/../task-a.0", ".task-a.0.part", ""]
)
def test_an_id_is_no_pattern_and_no_path(archive, make_rollout, wanted):
    archive.keep(make_rollout("task-a.0"))
    assert archive.find(wanted) == []


def test_nothing_is_found_where_nothing_was_kept(archive):
    assert archive.find("task-a.0") == []


def test_what_comes_again_takes_the_place_of_what_was_there(archive, make_rollout):
    for reward in (0.0, 1.0):
        archive.keep(make_rollout(reward=reward))
    [path] = archive.find("task-a.0")
    assert Rollout.decode(path.read_bytes()).reward == 1.0
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_is_cut_off_leaves_what_was_there(archive, make_rollout, monkeypatch):
    archive.keep(make_rollout(reward=0.0))

    def cut(*_: object) -> None:
        raise OSError("the power is gone")

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(OSError, match="the power is gone"):
        archive.keep(make_rollout(reward=1.0))
    with pytest.raises(OSError, match="the power is gone"):
        archive.keep(make_rollout("task-b.0"))
    monkeypatch.undo()
    [path] = archive.find("task-a.0")
    assert Rollout.decode(path.read_bytes()).reward == 0.0
    assert archive.find("task-b.0") == []
    archive.keep(make_rollout("task-b.0"))
    assert len(archive.find("task-b.0")) == 1


def test_a_report_comes_back(archive):
    path = archive.keep_report(report(3, planned=2))
    assert path == archive.run_dir / "steps" / "00000003.json"
    assert StepReport.model_validate_json(path.read_bytes()) == report(3, planned=2)
    archive.keep_report(report(3, planned=5))
    assert StepReport.model_validate_json(path.read_bytes()).planned == 5
