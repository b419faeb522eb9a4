"""`rollout export`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from made_runs import MadeRun, make_run


def test_the_newest_run_or_a_named_one(rollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert rollout("export")[0] == 2
    for name in ("old", "new"):
        make_run(tmp_path / "runs" / name, MadeRun(tasks=2, group=2))
    code, output = rollout("export", "old")
    assert code == 0
    assert output.startswith("runs/old/tables/rollouts.parquet: 4 rows")
    assert rollout("export", "--to", "jsonl", "--out", tmp_path / "out")[0] == 0
    assert len((tmp_path / "out" / "steps.jsonl").read_text().splitlines()) == 1
    assert rollout("export", "--to", "xml")[0] == 2
    code, output = rollout("export", "--out", tmp_path / "out" / "steps.jsonl")
    assert code == 2
    assert "the export of runs/new cannot be written" in output
    code, output = rollout("export", "no-such-run")
    assert code == 2
    assert "there is no run 'no-such-run'" in output


def test_a_missing_inspect_names_the_extra(rollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run", MadeRun(tasks=1, group=1))
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.delitem(sys.modules, "rollout_backend.report.inspect_logs", raising=False)
    code, output = rollout("export", run, "--to", "inspect")
    assert code == 2
    assert "needs inspect_ai, which is not installed: install the extra inspect" in output
    assert not (run / "inspect").exists()


def test_a_missing_pyarrow_names_the_extra(rollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run", MadeRun(tasks=1, group=1))
    monkeypatch.delitem(sys.modules, "rollout_backend.report.export", raising=False)
    monkeypatch.delitem(sys.modules, "rollout_backend.report.tables", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, output = rollout("export", run)
    assert code == 2
    assert "needs pyarrow, which is not installed: install the extra trainer" in output
