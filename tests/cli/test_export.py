"""`rollout export` and `rollout report`."""

from pathlib import Path

import pandas
import pyarrow.dataset
import pytest
import yaml

from builders import refused
from made_runs import MadeRun, make_run
from rollout_backend.run.accounts.archive import RunArchive


def test_the_newest_run_or_a_named_one(rollout, here):
    assert rollout("export")[0] == 2
    refused(rollout("report"), "there is no run in")
    for name in ("old", "new"):
        make_run(here / "runs" / name, MadeRun(tasks=2, group=2))
    code, output = rollout("export", "old")
    assert code == 0
    assert output.startswith("runs/old/tables/rollouts.parquet: 4 rows")
    assert rollout("export", "--to", "jsonl", "--out", here / "out")[0] == 0
    assert len((here / "out" / "steps.jsonl").read_text().splitlines()) == 1
    assert rollout("export", "--to", "xml")[0] == 2
    refused(rollout("export", "--out", here / "out" / "steps.jsonl"), "the export of runs/new cannot be written")
    assert rollout("report", "old") == (0, "report: runs/old/report.html")
    assert rollout("report", here / "runs" / "new", "--against", "old")[0] == 0
    assert rollout("report", "--serve", "--port", 70000)[0] == 2
    assert "Against old, step 0" in (here / "runs" / "new" / "report.html").read_text()
    for command in ("export", "report"):
        refused(rollout(command, "no-such-run"), "there is no run 'no-such-run'")
    assert rollout("export", "--out", "lr:1")[0] == 0
    assert (here / "lr:1" / "turns.parquet").is_file()


@pytest.fixture
def stored(tmp_path: Path, local_aws) -> Path:
    """Return the folder of a run whose settings name the local S3."""
    run = make_run(tmp_path / "run", MadeRun(tasks=2, group=2))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["aws"] = {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_tables_in_s3_can_be_read_there(rollout, stored, local_aws, monkeypatch: pytest.MonkeyPatch):
    place = f"s3://{local_aws.bucket}/tables/run-a"
    for _ in range(2):  # a second export replaces the first
        code, output = rollout("export", stored, "--out", place)
        assert code == 0, output
    assert output.startswith(f"{place}/rollouts.parquet: 4 rows")
    assert not (stored / "tables").exists()
    monkeypatch.setenv("AWS_ENDPOINT_URL", local_aws.endpoint_url)
    rollouts = pandas.read_parquet(f"{place}/rollouts.parquet")  # as docs/file-formats.md reads it
    assert list(rollouts["rollout_id"]) == [record.rollout_id for record in RunArchive(stored).read_records(0)]
    turns = pyarrow.dataset.dataset(f"s3://{local_aws.bucket}/tables/run-a/turns.parquet").to_table()
    assert turns.num_rows == rollouts["turns"].sum()


def test_what_s3_refuses_is_said(rollout, stored):
    refused(
        rollout("export", stored, "--out", "s3://no-such-bucket/tables"),
        "bucket no-such-bucket does not exist: create it, or correct --out",
    )
    for url in ("s3:///tables", "gs://bucket/tables"):
        refused(rollout("export", stored, "--out", url), f"{url} names no bucket: it must be s3://BUCKET/PREFIX")
