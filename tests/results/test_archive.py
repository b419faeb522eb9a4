"""The run directory: kept results are found again, and writes are atomic."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.step_report import StepResult
from rollouts import make_rollout
from run_folders import make_step


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[RunArchive]:
    archive = RunArchive(tmp_path / "runs" / "a-run")
    yield archive
    archive.close()


def write(archive: RunArchive, rollout: Rollout) -> bool:
    return archive.write_rollout(rollout, rollout.encode()).result()


def ended(step: int, *rollout_ids: str) -> StepResult:
    """Return a step whose rollouts failed with a message of any text."""
    message = '\u2028 \x85 \n "task.2" \x00'
    return make_step(dict.fromkeys(rollout_ids, (Outcome.INFRA_ERROR, "container_lost", message)), step=step)


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
    assert archive.write_report(ended(3, "task.0").report) is None
    assert caplog.text.count("No space left on device") == 1
    assert "Free space on the disk of output_dir" in caplog.text
    monkeypatch.undo()
    [path] = archive.find_rollout("task-a.0")
    assert Rollout.decode(path.read_bytes()).reward == 0.0
    assert archive.find_rollout("task-b.0") == []
    assert write(archive, make_rollout("task-b.0"))
    assert len(archive.find_rollout("task-b.0")) == 1


def test_records_of_several_steps_are_found_oldest_first(archive):
    for step in (10, 9):
        archive.write_records(step, ended(step, "task.0", "task.1", "task.10").records)
    archive.write_report(ended(9).report)
    found = archive.find_records("task.1")
    assert found == [*ended(9, "task.1").records, *ended(10, "task.1").records]
    assert archive.find_records("task") == archive.find_records("task.2") == []
    archive.write_records(9, ended(9, "task.0").records)
    assert archive.find_records("task.1") == [*ended(10, "task.1").records]


def test_files_that_no_run_has_written_are_no_steps(archive):
    archive.write_records(9, ended(9, "task.0").records)
    archive.write_running(10, ["{}"]).result()
    for copy in ("._00000009.rollouts.jsonl", "00000009 copy.rollouts.jsonl", "._00000010.running.jsonl"):
        (archive.run_dir / "steps" / copy).touch()
    assert archive.steps() == [9]
    assert list(archive.running_steps()) == [10]


def test_a_step_that_planned_nothing_keeps_earlier_records(archive):
    archive.write_records(9, ended(9, "task.0").records)
    archive.write_records(9, [])
    assert archive.find_records("task.0") == [*ended(9, "task.0").records]
