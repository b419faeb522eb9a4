"""The run directory: kept results are found again, and writes are atomic."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import PlannedRollout
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.records import RolloutRecord, records_of
from rollout_backend.results.step_report import StepReport, make_report
from rollouts import make_ledger, make_rollout


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[RunArchive]:
    archive = RunArchive(tmp_path / "runs" / "a-run")
    yield archive
    archive.close()


def write(archive: RunArchive, rollout: Rollout) -> bool:
    return archive.write_rollout(rollout, rollout.encode()).result()


def report(step: int, planned: int = 0) -> StepReport:
    ledger = make_ledger(step)
    ledger.plan(PlannedRollout(f"task.{i}", "task") for i in range(planned))
    return make_report("run", ledger, [], [], [], [], refused=0, seconds=1.0, deadline_reached=False)


def test_results_are_found_by_their_id_oldest_first(archive):
    for step in (10, 9, 100):
        write(archive, make_rollout("task-a.0", step=step, extras={"x": [1]}))
    paths = archive.find_rollout("task-a.0")
    assert [path.parent.name for path in paths] == ["00000009", "00000010", "00000100"]
    assert paths[0] == archive.run_dir / "rollouts" / "00000009" / "task-a.0"
    assert paths[0].read_bytes() == make_rollout("task-a.0", step=9, extras={"x": [1]}).encode()


@pytest.mark.parametrize(
    "wanted", ["task-a", "task-a.", "*", "task-a.[0]", "task-a.0/../task-a.0", ".task-a.0.part", ""]
)
def test_an_id_is_not_a_pattern_or_a_path(archive, wanted):
    assert archive.find_rollout("task-a.0") == []
    write(archive, make_rollout("task-a.0"))
    assert archive.find_rollout(wanted) == []


def test_a_failed_write_keeps_the_old_file_and_warns_once(archive, monkeypatch, caplog):
    write(archive, make_rollout(reward=0.0))

    def cut(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", cut)
    assert not write(archive, make_rollout(reward=1.0))
    assert not write(archive, make_rollout("task-b.0"))
    assert archive.write_report(report(3, planned=2)) is None
    assert caplog.text.count("No space left on device") == 1
    assert "Free space on the disk of output_dir" in caplog.text
    monkeypatch.undo()
    [path] = archive.find_rollout("task-a.0")
    assert Rollout.decode(path.read_bytes()).reward == 0.0
    assert archive.find_rollout("task-b.0") == []
    assert write(archive, make_rollout("task-b.0"))
    assert len(archive.find_rollout("task-b.0")) == 1


def records(step: int, *rollout_ids: str) -> list[RolloutRecord]:
    """Return records with a message of any text."""
    message = '\u2028 \x85 \n "task.2" \x00'
    ledger = make_ledger(step)
    ledger.plan(PlannedRollout(rollout_id, "task") for rollout_id in rollout_ids)
    for rollout_id in rollout_ids:
        ledger.entries[rollout_id].settle(Outcome.INFRA_ERROR, "container_lost", message)
    return records_of(ledger, lambda entry: "")


def test_records_of_several_steps_are_found_oldest_first(archive):
    for step in (10, 9):
        archive.write_records(step, records(step, "task.0", "task.1", "task.10"))
    archive.write_report(report(9))
    found = archive.find_records("task.1")
    assert found == [*records(9, "task.1"), *records(10, "task.1")]
    assert archive.find_records("task") == archive.find_records("task.2") == []
    archive.write_records(9, records(9, "task.0"))
    assert archive.find_records("task.1") == records(10, "task.1")


def test_a_step_that_planned_nothing_keeps_earlier_records(archive):
    archive.write_records(9, records(9, "task.0"))
    archive.write_records(9, [])
    assert archive.find_records("task.0") == records(9, "task.0")
