"""How much of a disk the copies of results may use."""

import shutil
from collections import namedtuple

import pytest

from rollout_backend.run.accounts import local_copies
from rollout_backend.run.accounts.archive import RunArchive
from rollouts import make_rollout

Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def disk(monkeypatch, tmp_path):
    """Stand for a disk of 1,000 bytes, on which only the run's copies and `other` bytes are."""
    used = {"other": 0}

    def usage(path):
        copies = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
        return Disk(1000, copies + used["other"], 1000 - copies - used["other"])

    monkeypatch.setattr(local_copies.shutil, "disk_usage", usage)
    return used


def stored(archive):
    return sorted(f"{path.parent.name[-1]}/{path.name}" for path in archive.run_dir.glob("rollouts/*/*"))


def write(archive, step, number, size):
    return archive.write_rollout(make_rollout(f"a.{number}", step=step), bytes(size)).result()


def test_the_copies_of_the_oldest_steps_are_deleted_first(tmp_path, disk):
    archive = RunArchive(tmp_path / "run", copies_gb=300e-9)
    (tmp_path / "run").mkdir()
    assert all(write(archive, step, number, 50) for step in (0, 1, 2) for number in (0, 1))
    assert len(stored(archive)) == 6
    assert write(archive, 2, 2, 50)
    assert stored(archive) == ["1/a.0", "1/a.1", "2/a.0", "2/a.1", "2/a.2"]
    archive.close()
    again = RunArchive(tmp_path / "run", copies_gb=300e-9)
    assert write(again, 3, 0, 200), "a restart counts the copies of the earlier start"
    assert stored(again) == ["3/a.0"]
    again.close()


def test_a_reserve_of_the_disk_is_kept_for_the_journal(tmp_path, disk, caplog):
    archive = RunArchive(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert [write(archive, 0, number, 100) for number in range(4)] == [True, True, False, False], "a quarter"
    assert [each.message.split(" is not copied here")[0] for each in caplog.records] == ["a.2"], "said once"
    disk["other"] = 700
    assert not write(archive, 1, 0, 210), "more than the disk has beyond its reserve"
    assert write(archive, 1, 0, 190), "at the cost of the older step"
    assert stored(archive) == ["1/a.0"]
    archive.close()


def test_a_directory_that_cannot_be_examined_does_not_stop_copies(tmp_path, monkeypatch):
    def usage(path):
        raise OSError("not mounted")

    monkeypatch.setattr(shutil, "disk_usage", usage)
    archive = RunArchive(tmp_path / "run")
    assert write(archive, 0, 0, 10)
    archive.close()
