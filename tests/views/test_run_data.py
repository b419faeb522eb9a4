"""What is read of a training that has many steps and rollouts."""

import functools
import json
import os

import pytest

from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import RunArchive, RunNames
from rollout_backend.views import parallel
from rollout_backend.views.comparison import compare_runs
from rollout_backend.views.page import report, training_page
from rollout_backend.views.page.charts import SHADES
from rollout_backend.views.run_data import RunData, list_runs, read_run
from run_folders import make_record, make_step, make_summary

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
        archive.write_report(make_step({each: float(step) for each in ids}, step=step).report)
    archive.close()
    return tmp_path / "run"


def test_a_training_is_listed_compared_and_reported_without_its_records(run, monkeypatch):
    """A training of 2,000 steps with 4,096 rollouts has 8 million records, of 6 GB."""

    def fail(*arguments):
        raise AssertionError("records were read")

    monkeypatch.setattr(RunArchive, "record_lines", fail)
    monkeypatch.setattr(RunArchive, "read_report", fail)
    monkeypatch.setattr(report, "MAX_PAGE_ROLLOUTS", 0)
    [listed] = list_runs(run.parent)
    assert (listed.steps, listed.completed, listed.planned, listed.mean_reward) == (STEPS, 48, 48, 2.5)
    found = compare_runs(run, run)
    assert (found.reward.tasks, found.reward.first, found.changed_tasks) == (TASKS, 2.5, 0)
    page = report.write_report(run).read_text()
    assert "<h1>run <small>6 steps" in page
    assert "+5" in page  # the gain of a task
    assert RunNames(RunArchive(run), range(STEPS)).tasks == ("t0", "t1", "t2", "t3")
    assert not RunArchive(run).find_records("t4.0")
    assert not RunArchive(run).find_task("t4")


def test_only_steps_with_the_task_are_read_for_a_rollout(run, monkeypatch):
    """Another start of the trainer adds its generation to the ids of rollouts."""
    archive, read = RunArchive(run), list[int]()
    archive.write_records(9, [make_record("a.b.1.g2", task_id="a.b", step=9)])
    lines = archive.record_lines
    monkeypatch.setattr(archive, "record_lines", lambda step: read.append(step) or lines(step))
    assert [record.step for record in archive.find_records("a.b.1.g2")] == [9]
    assert [record.step for record in archive.find_task("a.b")] == [9]
    assert {*read} == {9}
    archive.close()


def test_an_overview_is_made_again_if_the_report_changed(run):
    archive = RunArchive(run)
    assert archive.read_overview(0).groups == (4, 4)
    archive.write_report(make_step({"t0.0": 1.0, "t1.0": ("infra_error", "throttled", "")}).report)
    archive.close()
    assert read_run(run).steps[0].overview.groups == (1, 2)
    (run / "steps" / "00000000.json").unlink()
    assert not read_run(run).steps[0].overview.has_report
    (run / "steps" / "00000000.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"step 00000000 in .* cannot be read"):
        read_run(run)


def test_the_page_of_steps_compares_tasks_that_several_steps_planned(tmp_path):
    archive = RunArchive(tmp_path / "run")
    for step, rewards in enumerate(
        [{"falls": 1.0, "once": 1.0}, {"rises": 0.25}, {"lost": None, "falls": 0.5, "rises": 1.0}, {"lost": None}]
    ):
        results = {f"{task}.0": make_summary(reward) for task, reward in rewards.items()}
        archive.write_records(step, [make_record(each, step=step, result=result) for each, result in results.items()])
    archive.close()
    steps = read_run(tmp_path / "run").steps
    shown = training_page.training_context(RunData(tmp_path / "run", "run", steps, None), {})["tasks"]
    assert (shown["of"], shown["once"], shown["low"], shown["high"]) == (3, 1, 0.0, 1.0)
    assert shown["rows"] == [
        ("falls", -0.5, [(0, SHADES, 1.0), (2, round(SHADES / 2), 0.5)]),
        ("lost", 0.0, [(2, None, None), (3, None, None)]),
        ("rises", 0.75, [(1, round(SHADES / 4), 0.25), (2, SHADES, 1.0)]),
    ]


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
        assert archive.read_overview(0).has_report
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
