"""The report of a running run, over HTTP. The renewal in a browser is tested in `test_browser`."""

import os
import time
from pathlib import Path

import httpx
import pytest

from builders import run_config
from made_runs import MadeRun, make_run, reopen_last_step
from report_page import Page
from rollout_backend.errors import StartupError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.run_info import RunStart
from rollout_backend.views.page.report import ReportServer, serve_report, write_report


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Return the folder of a run whose only step runs, with 3 open rollouts."""
    folder = make_run(tmp_path / "run", MadeRun(tasks=3, group=3))
    reopen_last_step(folder, still_open=3)
    return folder


async def test_only_this_machines_names_reach_a_page(running: Path):
    async with serve_report(ReportServer(running), "127.0.0.1", 0) as url, httpx.AsyncClient(timeout=120) as client:
        assert (await client.get(url)).status_code == 200
        refused = await client.get(url, headers={"Host": "rebound.example.com"})
        assert refused.status_code == 403
        assert "buy-3" not in refused.text
        for path in ("config.yaml", "report/../config.yaml", "report/00000009.html", "steps/00000000.tasks.jsonl"):
            assert (await client.get(url + path)).status_code == 404


async def test_the_port_is_taken(running: Path):
    server = ReportServer(running)
    async with serve_report(server, "127.0.0.1", 0) as url:
        with pytest.raises(StartupError, match="--port"):
            async with serve_report(server, "127.0.0.1", httpx.URL(url).port or 0):
                pass


async def test_a_run_without_a_step_has_a_page_that_renews_itself(tmp_path: Path):
    (tmp_path / "run").mkdir()
    server = ReportServer(tmp_path / "run", renew_s=0, share=1)
    async with serve_report(server, "127.0.0.1", 0) as url, httpx.AsyncClient(timeout=120) as client:
        first = await client.get(url)
        assert "holds no records of a step" in first.text
        assert "location.reload" in first.text
        before = (await client.get(f"{url}version")).text
        make_run(tmp_path / "run", MadeRun(tasks=2, group=2))
        assert (await client.get(f"{url}version")).text != before
        assert "buy-3" in (await client.get(url)).text


def test_a_running_step_is_shown_with_the_time_left_of_each_open_rollout(running: Path):
    page = Page(write_report(running))
    assert "3 in a session" in page.text("open")
    assert "interrupted" not in page.html.partition("<script>")[0]


def test_a_step_of_a_killed_run_is_shown_as_interrupted(running: Path):
    long_ago = time.time() - 3600
    os.utime(running / "steps" / "00000000.running.jsonl", (long_ago, long_ago))
    page = Page(write_report(running))
    assert "open" not in page.texts
    assert "✗ interrupted" in page.html


@pytest.mark.parametrize(("process", "shown"), [({"started": 1}, "killed"), ({"machine": "b"}, "silent since 2001")])
def test_a_run_whose_process_is_gone_or_silent_is_not_shown_as_running(running: Path, process: dict, shown: str):
    archive, config = RunArchive(running), run_config(run_id="run", output_dir=running.parent)
    start = RunStart.of(config, "verl", {}, None)
    archive.write_start(config, start.model_copy(update={"process": start.process.model_copy(update=process)}))
    archive.close()
    os.utime(running / "run.json", (1e9, 1e9))
    for page in (Page(write_report(running)), Page(write_report(make_run(running, MadeRun(tasks=2, steps=2))))):
        assert f" · {shown}" in page.html
        assert "3 in a session" not in page.html


def test_the_final_records_replace_those_of_the_running_step(tmp_path: Path):
    folder = make_run(tmp_path / "run", MadeRun(tasks=3, group=3))
    step, records = reopen_last_step(folder, still_open=3)
    archive = RunArchive(folder)
    archive.write_running(step, [records[0].model_dump_json()])
    archive.write_records(step, records)
    archive.close()
    assert archive.running_steps() == {}
    assert "open" not in Page(write_report(folder)).texts
