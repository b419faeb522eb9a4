"""The page over all steps of a training run."""

import os
from pathlib import Path
from statistics import fmean

import pytest

from made_runs import MadeRun, make_run
from report_page import Page
from rollout_backend.config import AgentCoreConfig
from rollout_backend.local.cloud import ARN
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.page.report import write_report
from rollout_backend.results.run_data import changed_settings


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 4 steps, with its report."""
    run = make_run(tmp_path_factory.mktemp("runs") / "t", MadeRun(tasks=6, group=4, steps=4, skill=0.1, lost=0.2))
    write_report(run)
    return run


def test_each_step_has_a_row_with_its_numbers_and_a_link_to_its_page(training: Path):
    page = Page(training / "report.html")
    text = page.text("steps")
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a" and "html" in str(attributes["href"])]
    assert len(set(links)) == 4
    for step in range(4):
        records = RunArchive(training).read_records(step)
        known = [record.reward for record in records if record.reward is not None]
        completed = sum(record.outcome == "completed" for record in records)
        assert f"step {step} {fmean(known):.3g} " in text
        assert f"{completed} / 24" in text
        below = Page(training / f"report/{step:08d}.html")
        assert below.data["id"] == [record.rollout_id for record in records]
        assert ("a", {"href": "../report.html"}) in below.tags


def test_a_page_of_a_step_that_did_not_change_is_kept(training: Path):
    page = training / "report" / "00000001.html"
    page.write_text("kept")
    write_report(training)
    assert page.read_text() == "kept"
    records = training / "steps" / "00000001.rollouts.jsonl"
    os.utime(records, (page.stat().st_mtime + 10,) * 2)
    write_report(training)
    assert page.read_text().startswith("<!doctype html>")


def test_the_secret_path_of_a_local_cloud_is_not_shown():
    runtime = AgentCoreConfig(
        arn=ARN.format(region="us-east-1"), endpoint_url="http://127.0.0.1:4000/0123456789abcdef"
    )
    assert ("endpoint_url", "http://127.0.0.1:4000") in changed_settings(runtime)
