"""The run directory: kept results are found again, and writes are atomic."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.base import disk
from rollout_backend.run.accounts import archive as archive_module
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.step_report import StepResult
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


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """An archive on a disk that does not answer until `free` is set, of which little may wait."""
    monkeypatch.setattr(disk, "DISK_S", 0.05)
    monkeypatch.setattr(archive_module, "_MAX_PENDING_BYTES", len(b"second"))
    free, begun = threading.Event(), threading.Event()

    def write(path: Path, data: bytes) -> None:
        begun.set()
        assert free.wait(120)

    hung = RunArchive(tmp_path / "run", write)
    hung.free, hung.begun = free, begun
    yield hung
    free.set()


async def test_a_disk_that_hangs_holds_up_neither_a_step_nor_the_end_of_a_run(hung, caplog):
    kept = [hung.write_rollout(make_rollout("task-a.0"), b"first")]
    assert hung.begun.wait(120)
    kept.append(hung.write_rollout(make_rollout("task-b.0"), b"second"))
    assert hung.write_rollout(make_rollout("task-c.0"), b"third").result() is False, "S3 has it"
    await hung.wait(*kept, hung.submit(hung.write_report, ended(0, "task-a.0").report))
    hung.close()
    assert "does not answer: results are not copied there. S3 has them" in caplog.text
    assert caplog.text.count("files of this run are missing or old until it does") == 2
    hung.free.set()
    assert [await asyncio.wrap_future(each) for each in kept] == [True, True], (
        "they are written once the disk answers"
    )


def test_a_defect_in_the_writers_thread_is_logged(archive, caplog):
    archive.submit(lambda: 1 // 0)
    archive.close()
    assert f"a call of the disk of {archive.run_dir} has failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
