"""The tables that `rollout export` writes."""

import csv
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from made_runs import MadeRun, make_run
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.step_report import StepReport
from rollout_backend.views.export import SCHEMAS, TABLES_VERSION, _open, event_rows, export_run, turn_rows
from rollouts import make_rollout, make_segment
from run_folders import write_run

PAGE = Path(__file__).parents[2] / "docs" / "file-formats.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three steps with 24 rollouts each, of which the last step was interrupted."""
    folder = make_run(
        tmp_path_factory.mktemp("runs") / "run-a", MadeRun(tasks=6, group=4, steps=3, lost=0.4, stored=9)
    )
    (folder / "steps" / "00000002.json").unlink()
    return folder


def records_of(run: Path) -> list[RolloutRecord]:
    archive = RunArchive(run)
    return [record for step in archive.steps() for record in archive.read_records(step)]


def read(out: Path) -> dict[str, list[dict]]:
    return {name: pyarrow.parquet.read_table(out / f"{name}.parquet").to_pylist() for name in SCHEMAS}


@pytest.fixture(scope="module")
def tables(run: Path) -> dict[str, list[dict]]:
    export_run(run, "parquet", run / "tables")
    return read(run / "tables")


def test_every_planned_rollout_has_a_row_and_a_missing_reward_is_null(run: Path, tables):
    records = records_of(run)
    rows = tables["rollouts"]
    assert [(row["step"], row["rollout_id"]) for row in rows] == [(each.step, each.rollout_id) for each in records]
    assert [row["reward"] for row in rows] == [record.reward for record in records]
    assert {None, 0.0, 1.0} <= {row["reward"] for row in rows}
    for row, record in zip(rows, records, strict=True):
        assert (row["outcome"], row["reason"] or "") == (record.outcome, record.reason)
        assert row["settled_at"].timestamp() == pytest.approx(record.settled_at, abs=1e-5)
        assert row["sampled_tokens"] == (record.result.sampled_tokens if record.result else None)
    assert sum(row["stored"] for row in rows) == 27
    assert any(row["traceback"] and row["reward"] is None for row in rows if row["outcome"] == "agent_error")


def test_each_model_call_of_a_stored_result_has_a_row(tables):
    turns = tables["turns"]
    for row in tables["rollouts"]:
        mine = [turn for turn in turns if (turn["step"], turn["rollout_id"]) == (row["step"], row["rollout_id"])]
        assert [turn["turn"] for turn in mine] == ([0, 1] if row["stored"] else [])
        for column in ("sampled_tokens", "prompt_tokens", "cached_tokens") if mine else ():
            assert sum(turn[column] for turn in mine) == row[column]
    first, last, *_ = turns
    assert json.loads(first["tool_calls"])[0]["function"]["name"] == "price"
    assert last["tool_calls"] is None
    assert "The answer is" in last["text"]
    assert all(turn["mean_logprob"] < 0 and turn["weight_version"] == turn["last_weight_version"] for turn in turns)


def test_events_are_in_order_and_end_with_the_outcome(run: Path, tables):
    assert len({(row["step"], row["rollout_id"]) for row in tables["events"]}) == 72
    for record in records_of(run):
        *_, before, last = events = list(event_rows("run-a", record))
        assert [event["number"] for event in events] == [*range(len(events))]
        assert events[0]["event"] == "planned"
        assert [each["session_id"] for each in events if each["event"] == "session"] == [*record.session_ids]
        assert (last["event"], last["outcome"]) == ("settled", record.outcome)
        assert (before["event"] == "result") == (record.result_at is not None)
        assert last["after_s"] == record.settled_at - record.planned_at


def test_a_step_has_the_numbers_of_its_report_and_null_if_it_was_interrupted(run: Path, tables):
    first, _, interrupted = tables["steps"]
    report = StepReport.model_validate_json((run / "steps" / "00000000.json").read_bytes())
    assert {name: first[name] for name in report.outcomes} == report.outcomes
    assert (first["planned"], first["trainable"], first["seconds"]) == (24, report.trainable, report.seconds)
    rewards = [each.reward for each in records_of(run) if each.step == 0 and each.reward is not None]
    assert first["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert interrupted["planned"] == 24
    assert interrupted["seconds"] is interrupted["groups"] is None


def test_a_run_without_results_has_tables_with_the_same_types(tmp_path: Path):
    run = write_run(tmp_path / "lost", {"a": [None, None]})
    export_run(run, "parquet", tmp_path / "out")
    for name, schema in SCHEMAS.items():
        found = pyarrow.parquet.read_schema(tmp_path / "out" / f"{name}.parquet")
        assert found.equals(schema)
        assert found.metadata == {b"schema_version": b"%d" % TABLES_VERSION, b"run_id": b"lost"}
    tables = read(tmp_path / "out")
    assert [row["reward"] for row in tables["rollouts"]] == [None, None]
    assert tables["turns"] == []
    assert tables["steps"][0]["mean_reward"] is None


def test_csv_and_json_lines_hold_the_same_rows(run: Path, tables, tmp_path: Path):
    for to in ("csv", "jsonl"):
        export_run(run, to, tmp_path)
    for name, schema in SCHEMAS.items():
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [list(line) for line in lines] == [schema.names] * len(tables[name])
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            cells = list(csv.DictReader(file))
        assert len(cells) == len(lines)
        for column in {"reward", "mean_reward", "rollout_id", "text"} & {*schema.names}:
            assert [line[column] for line in lines] == [row[column] for row in tables[name]]
            assert [row[column] == "" for row in cells] == [line[column] is None for line in lines]
    assert json.loads((tmp_path / "schema.json").read_text())["schema_version"] == TABLES_VERSION


def test_a_spreadsheet_runs_no_text_of_a_csv_as_a_formula(tmp_path: Path):
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a=1", "a\n=1", "", None]
    schema = pa.schema([("text", pa.string()), ("number", pa.int64())])
    writer = _open(tmp_path / "t.csv", schema, "csv")
    writer.write_batch(pa.RecordBatch.from_pylist([{"text": text, "number": -1} for text in texts], schema))
    writer.close()
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == [*(f"'{text}" for text in texts[:6]), "a=1", "a\n=1", "", ""]
    assert {row["number"] for row in rows} == {"-1"}


def test_rows_are_written_in_batches(run: Path, tables, tmp_path: Path):
    export_run(run, "parquet", tmp_path, max_rows=20)
    assert pyarrow.parquet.ParquetFile(tmp_path / "rollouts.parquet").num_row_groups == 4
    assert read(tmp_path) == tables


def test_a_failed_export_changes_nothing(run: Path, tmp_path: Path):
    broken = make_run(tmp_path / "run-b", MadeRun(tasks=1, group=1, steps=2))
    out = tmp_path / "out"
    export_run(broken, "jsonl", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (broken / "steps" / "00000001.rollouts.jsonl").write_text("{}\n")
    for to in ("parquet", "csv", "jsonl"):
        with pytest.raises(ConfigError, match=r"step 00000001 .* cannot be read"):
            export_run(broken, to, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_documentation_lists_every_column_with_its_type():
    text = PAGE.read_text()
    assert f"`schema_version` is {TABLES_VERSION}." in text
    for name, schema in SCHEMAS.items():
        section = re.split(r"^##", text.partition(f"\n### {name}\n")[2], flags=re.M)[0]
        documented = re.findall(r"^\| `(\w+)` \| (\w+\??) \| \S", section, flags=re.M)
        types = [f"{str(field.type).partition('[')[0]}{'?' * field.nullable}" for field in schema]
        assert documented == [*zip(schema.names, types, strict=True)]


def test_the_pandas_example_of_the_documentation_runs(run: Path, tables, capsys: pytest.CaptureFixture[str]):
    example = re.search(r"^```python\n(import pandas.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert example is not None
    exec(example[1].replace("runs/RUN_ID", str(run)), {})
    assert "buy-3-melon" in capsys.readouterr().out


def test_what_a_turn_does_not_know_is_null():
    record = RolloutRecord.model_construct(step=0, rollout_id="task-a.0", task_id="task-a")
    rollout = make_rollout(segments=[make_segment(), make_segment(version=None, logprob=None)])
    known, unknown = turn_rows("run", record, rollout)
    assert (known["segment"], known["mean_logprob"], known["weight_version"]) == (0, -0.5, "7")
    assert (unknown["segment"], unknown["mean_logprob"], unknown["weight_version"]) == (1, None, None)
    assert "text" not in unknown
