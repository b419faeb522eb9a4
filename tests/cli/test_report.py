"""`rollout report`, and the report that `rollout run` leaves."""

from pathlib import Path

from builders import refused
from made_runs import MadeRun, make_run


def test_the_newest_run_or_a_named_one(rollout, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(rollout("report"), "there is no run in")
    for name in ("old", "new"):
        make_run(tmp_path / "runs" / name, MadeRun(tasks=2, group=2))
    assert rollout("report", "old") == (0, "report: runs/old/report.html")
    assert rollout("report", tmp_path / "runs" / "new", "--against", "old")[0] == 0
    assert "Against old, step 0" in (tmp_path / "runs" / "new" / "report.html").read_text()
    refused(rollout("report", "no-such-run"), "there is no run 'no-such-run'")
