"""What is read of a training that has many steps and rollouts."""

import functools
import json
import os

import pytest

from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError
from rollout_backend.results import parallel
from rollout_backend.results.archive import RunArchive, RunNames
from rollout_backend.results.comparison import compare_runs
from rollout_backend.results.page import report
from rollout_backend.results.run_data import list_runs, read_run
from run_folders import make_record, make_summary

STEPS, TASKS = 6, 4


@pytest.fixture
def run(tmp_path):
    """Write a training whose steps have the same tasks; the reward of step n is n."""
    archive = RunArchive(tmp_path / "run")
    for step in range(STEPS):
        archive.write_tasks(step, [Task(f"t{task}", {"q": task}) for task in range(TASKS)])
        ids = [f"t{task}.{number}" for task in range(TASKS) for number in range(2)]
        result = make_summary(float(step))
        archive.write_records(step, [make_record(each, step=step, trainable=True, result=result) for each in ids])
    archive.close()
    return tmp_path / "run"


def test_a_training_is_listed_compared_and_reported_without_its_records(run, monkeypatch):
    """A training of 2,000 steps with 4,096 rollouts has 8 million records, of 6 GB."""

    def fail(*arguments):
        raise AssertionError("records were read")

    monkeypatch.setattr(RunArchive, "record_lines", fail)
    monkeypatch.setattr(report, "MAX_PAGE_ROLLOUTS", 0)
    [listed] = list_runs(run.parent)
    assert (listed.steps, listed.completed, listed.planned, listed.mean_reward) == (STEPS, 48, 48, 2.5)
    found = compare_runs(run, run)
    assert (found.reward.tasks, found.reward.first, found.changed_tasks) == (TASKS, 2.5, 0)
    page = report.write_report(run).read_text()
    assert "<h1>run <small>6 steps" in page
    assert "+5" in page  # the gain of a task
    assert RunNames(RunArchive(run), range(STEPS)).tasks == ("t0", "t1", "t2", "t3")


def test_pages_of_the_newest_steps_are_written_up_to_a_number_of_rollouts(run, monkeypatch):
    monkeypatch.setattr(report, "MAX_PAGE_ROLLOUTS", 9)
    # A page of a step that was just interrupted is written again, because it says that the step runs.
    for path in run.glob("steps/*"):
        os.utime(path, (1.0, 1.0))
    report.write_report(run)
    pages = sorted(path.name for path in (run / "report").iterdir())
    assert pages == ["00000004.html", "00000005.html"]
    text = report.write_report(run).read_text()
    assert len([*(run / "report").iterdir()]) == 4, "current pages are kept, and older ones follow"
    assert "report/00000002.html" in text


def test_a_summary_is_made_again_if_its_records_changed_or_it_is_damaged(run):
    archive, file = RunArchive(run), run / "steps" / "00000000.summary.jsonl"
    stored = file.read_bytes()
    for content in (b"", b"{}\n{}\n", b"no json", stored.splitlines()[0]):
        file.write_bytes(content)
        assert (archive.read_summary(0).planned, archive.read_totals(0).task_ids[0]) == (8, "t0")
        assert file.read_bytes() == stored
    archive.write_records(0, [make_record("a.0", result=make_summary(0.5))])
    assert (archive.read_summary(0).planned, archive.read_totals(0).task_ids) == (1, ("a",))
    (run / "steps" / "00000000.rollouts.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"line 1 of 00000000.rollouts.jsonl is no record: Field required"):
        read_run(run)
    archive.close()


def test_unsettled_rollouts_survive_a_stored_summary(tmp_path):
    archive = RunArchive(tmp_path)
    archive.write_records(0, [make_record("a.0", outcome=None, settled_at=None)])
    archive.close()
    lines = (tmp_path / "steps" / "00000000.summary.jsonl").read_bytes().splitlines()
    assert json.loads(lines[0])["summary"]["outcomes"] == {"None": 1}
    assert archive.read_summary(0).outcomes == {None: 1}


def test_pieces_are_worked_on_by_several_processes_in_order(monkeypatch):
    monkeypatch.setattr(parallel, "MIN_ROLLOUTS", 1)
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda pid: {0, 1})
    taken = []

    def pieces():
        for number in range(20):
            taken.append(number)
            yield number

    found = parallel.map_in_order(functools.partial(pow, 2), pieces(), 1)
    assert (next(found), len(taken)) == (1, 4), "only a few pieces are in flight"
    assert [*found] == [2**number for number in range(1, 20)]
