"""Define the tables of a run and export them to files.

Invariants:

- The schema, never the values, determines the types, so an empty table has the same columns as a full one.
- Missing values are null. A missing reward is never 0.
- Changing a column's meaning or type, or removing it, requires a new `TABLES_VERSION`. Adding a column does not.
- Memory holds only the records of one step and `max_rows` rows of each table, regardless of the run's size.
- The files of an earlier export are replaced once all new ones are complete. A failed export leaves no files.
"""

import contextlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
from botocore.exceptions import BotoCoreError, ClientError

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.base import aws
from rollout_backend.base.atomic_file import write_file
from rollout_backend.config.results import AwsConfig
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.cost import Prices
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord, replies_by_turn, text_of
from rollout_backend.run.accounts.step_report import StepReport
from rollout_backend.run.accounts.summary import mean
from rollout_backend.views.parallel import chunks, map_in_order
from rollout_backend.views.run_data import StepData, read_config, read_rollout, read_run_id, read_steps, reading

TableFormat = Literal["parquet", "csv", "jsonl"]
TABLES_VERSION = 1

Row = dict[str, Any]

_TYPES = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "time": pa.timestamp("us", tz="UTC"),
}


def export_run(
    run_dir: Path,
    to: TableFormat,
    out: Path,
    *,
    max_rows: int = 5000,
    follow: Callable[[int, int], None] = lambda done, planned: None,
) -> dict[Path, int]:
    """Write the tables of a run and `schema.json` into a folder. Return the number of rows of each table's file.

    For a large run, several processes read the results. `max_rows` is the number of rows of a table that are written
    together and, with Parquet, the most in a row group. `follow` is called with the numbers of read and of planned
    rollouts.

    Raises:
        ConfigError: the run's folder holds no step, or a file of another version.
        OSError: the disk refuses a file.
    """
    run_id, archive = read_run_id(run_dir), RunArchive(run_dir)
    config = read_config(run_dir)
    prices = Prices.of(config) if config is not None else None
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as parts:
        tables = {
            name: _Table(out / f"{name}.{to}", schema, to, run_id, parts, max_rows)
            for name, schema in SCHEMAS.items()
        }
        planned = 0
        for step in read_steps(run_dir):
            tables["steps"].add(_batch("steps", [step_row(run_id, step, prices)]))
            planned += step.summary.planned
        pieces = (
            _Piece(run_dir, run_id, step, lines)
            for step in archive.steps()
            for lines in chunks(archive.record_lines(step))
        )
        for piece in map_in_order(_read_rows, pieces, planned):
            for name, batch in piece.items():
                tables[name].add(batch)
            follow(tables["rollouts"].rows, planned)
        for table in tables.values():
            table.close()
        for table in tables.values():
            table.part.replace(table.path)
        columns = {name: {field.name: str(field.type) for field in schema} for name, schema in SCHEMAS.items()}
        about = {"schema_version": TABLES_VERSION, "run_id": run_id, "tables": columns}
        write_file(out / "schema.json", json.dumps(about, indent=1).encode())
    return {table.path: table.rows for table in tables.values()}


@dataclass(frozen=True)
class _Piece:
    """Some lines of a step's records."""

    run_dir: Path
    run_id: str
    step: int
    lines: Sequence[bytes]


def _read_rows(piece: _Piece) -> dict[str, pa.RecordBatch]:
    """Return the rows of the tables about rollouts."""
    archive, run_id = RunArchive(piece.run_dir), piece.run_id
    rows: dict[str, list[Row]] = {"rollouts": [], "turns": [], "events": []}
    with reading(archive, piece.step):
        records = [*map(RolloutRecord.model_validate_json, piece.lines)]
    for record in records:
        rollout = read_rollout(archive, record)
        rows["rollouts"].append(rollout_row(run_id, record, rollout))
        rows["events"] += event_rows(run_id, record)
        if rollout is not None:
            rows["turns"] += turn_rows(run_id, record, rollout)
    return {name: _batch(name, of_table) for name, of_table in rows.items()}


def _batch(name: str, rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMAS[name])


class _Writer(Protocol):
    def write_batch(self, batch: Any) -> None: ...

    def close(self) -> None: ...


class _Table:
    """One table, which is written to `part` until it is complete."""

    def __init__(
        self, path: Path, schema: pa.Schema, to: TableFormat, run_id: str, parts: contextlib.ExitStack, max_rows: int
    ) -> None:
        self.path, self.part, self.rows = path, path.with_name(f".{path.name}.part"), 0
        self._schema = schema.with_metadata({"schema_version": str(TABLES_VERSION), "run_id": run_id})
        self._pending: list[pa.RecordBatch] = []
        self._max_rows = max_rows
        parts.callback(self.part.unlink, missing_ok=True)
        self._writer = _open(self.part, self._schema, to)
        parts.callback(self._writer.close)

    def add(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self.rows += batch.num_rows
        if sum(each.num_rows for each in self._pending) >= self._max_rows:
            self._write(self._max_rows)

    def close(self) -> None:
        self._write(1)
        self._writer.close()

    def _write(self, least: int) -> None:
        """Write the pending rows, except a last batch of fewer than `least`."""
        pending = pa.Table.from_batches(self._pending, self._schema).combine_chunks()
        self._pending = []
        for batch in pending.to_batches(self._max_rows):
            if batch.num_rows >= least:
                self._writer.write_batch(batch)
            elif batch.num_rows:
                self._pending.append(batch)


def _open(path: Path, schema: pa.Schema, to: TableFormat) -> _Writer:
    # pyarrow parses a relative path with a colon as a URL.
    path = path.absolute()
    if to == "parquet":
        writer: _Writer = pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
    elif to == "csv":
        writer = _Csv(path, schema)
    else:
        writer = _JsonLines(path)
    return writer


class _Csv:
    """Writes CSV and prevents spreadsheets from running agents' untrusted text as formulas."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pyarrow.csv.CSVWriter(path, schema)

    def write_batch(self, batch: Any) -> None:
        columns = [
            pyarrow.compute.replace_substring_regex(column, r"\A([=+\-@\t\r])", r"'\1")
            if pa.types.is_string(column.type)
            else column
            for column in batch.columns
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))

    def close(self) -> None:
        self._writer.close()


class _JsonLines:
    """Writes one JSON object per line, with times in ISO 8601."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def write_batch(self, batch: Any) -> None:
        iso = operator.methodcaller("isoformat", timespec="microseconds")
        for row in batch.to_pylist():
            self._file.write(f"{json.dumps(row, ensure_ascii=False, default=iso)}\n")

    def close(self) -> None:
        self._file.close()


SCHEME = "s3://"


def parse_s3_folder(url: str) -> tuple[str, str]:
    """Return bucket and prefix of `s3://BUCKET/PREFIX`. The prefix is empty, or ends in a slash.

    Raises:
        ConfigError: the URL has another scheme, or names no bucket.
    """
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    if not bucket or not url.startswith(SCHEME):
        raise ConfigError(f"{url} names no bucket: it must be s3://BUCKET/PREFIX")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""


async def upload(files: Iterable[Path], bucket: str, prefix: str, config: AwsConfig) -> None:
    """Upload files one by one. A completed upload replaces the object of the same name.

    Raises:
        ConfigError: S3 refuses a file; says why.
    """
    async with aws.client("s3", region=config.region, endpoint_url=config.endpoint_of("s3"), retries=4) as s3:
        for file in files:
            try:
                await s3.upload_file(str(file), bucket, f"{prefix}{file.name}")
            except (ClientError, BotoCoreError) as error:
                raise ConfigError(str(aws.preflight_error(error, f"bucket {bucket}", "--out"))) from None


def _schema(*columns: str) -> pa.Schema:
    """Return a schema of columns such as `reward:float?`: a name and a key of `_TYPES`, with `?` if nullable."""
    pairs = (column.split(":") for column in " ".join(columns).split())
    return pa.schema([pa.field(name, _TYPES[kind.rstrip("?")], kind.endswith("?")) for name, kind in pairs])


_ROLLOUT = "run_id:text step:int rollout_id:text task_id:text"
_ENDING = "outcome:text? reason:text? message:text?"
# A column such as `cached_tokens:int?` for each figure, all null without a result.
_OF_RESULT = " ".join(
    f"{name}:{getattr(kind, '__args__', (kind,))[0].__name__}?"
    for name, kind in ResultSummary.__annotations__.items()
)
_OF_REPORT = (
    "attempts", "sessions_opened", "resumed", "reattached", "duplicates", "late", "refused", "unarchived", "surplus",
    "sampled_tokens", "given_tokens", "broken_histories",
)  # fmt: skip

# A row may omit nullable columns.
SCHEMAS: dict[str, pa.Schema] = {
    "rollouts": _schema(
        _ROLLOUT,
        _ENDING,
        "trainable:bool group_usable:bool is_replacement:bool attempts:int session_id:text? log:text?",
        "planned_at:time invoked_at:time? accepted_at:time? result_at:time? settled_at:time?",
        _OF_RESULT,
        "stored:bool extras:text? traceback:text?",
    ),
    "turns": _schema(
        _ROLLOUT,
        "number:int segment:int turn:int prompt_tokens:int sampled_tokens:int cached_tokens:int? finish_reason:text",
        "weight_version:text? last_weight_version:text? seconds:float mean_logprob:float?",
        "reasoning:text? text:text? tool_calls:text?",
    ),
    "events": _schema(_ROLLOUT, "number:int event:text at:time? after_s:float? session_id:text?", _ENDING),
    "steps": _schema(
        "run_id:text step:int name:text validates:bool planned:int",
        *(f"{outcome}:int" for outcome in Outcome),
        "trainable:int mean_reward:float? groups:int? groups_usable:int? groups_with_spread:int?",
        *(f"{name}:int?" for name in _OF_REPORT),
        "mean_staleness:float? max_staleness:int? seconds:float? deadline_reached:bool?",
        "cost_dollars:float? wasted_dollars:float?",
    ),
}


def rollout_row(run_id: str, record: RolloutRecord, rollout: Rollout | None) -> Row:
    """Return the row of a planned rollout. `rollout` is its stored result."""
    failure = rollout.failure if rollout is not None else None
    return {
        **_key(run_id, record),
        **_ending(record),
        "trainable": record.trainable,
        "group_usable": record.group_usable,
        "is_replacement": record.is_replacement,
        "attempts": record.attempts,
        "session_id": record.session_ids[-1] if record.session_ids else None,
        "log": record.log,
        **{f"{event}_at": _time(at) for event, at in record.times.items()},
        **(record.result.model_dump() if record.result is not None else {}),
        "stored": rollout is not None,
        "extras": json.dumps(rollout.extras, ensure_ascii=False) if rollout is not None else None,
        "traceback": failure.traceback if failure is not None else None,
    }


def turn_rows(run_id: str, record: RolloutRecord, rollout: Rollout) -> Iterator[Row]:
    """Yield a row for each model call of a rollout whose tokens are known."""
    numbers = itertools.count()
    for number, segment in enumerate(rollout.segments):
        replies = replies_by_turn(segment)
        for i, turn in enumerate(segment.turns):
            versions = turn.weight_versions
            logprobs = [each for each in segment.logprobs[turn.start : turn.end] if not math.isnan(each)]
            yield {
                **_key(run_id, record),
                "number": next(numbers),
                "segment": number,
                "turn": i,
                "prompt_tokens": turn.start,
                "sampled_tokens": turn.end - turn.start,
                "cached_tokens": turn.cached_tokens,
                "finish_reason": turn.finish_reason,
                "weight_version": versions[0].version if versions else None,
                "last_weight_version": versions[-1].version if versions else None,
                "seconds": turn.seconds,
                "mean_logprob": mean(logprobs),
                **(_texts(segment.messages[replies[i]]) if i in replies else {}),
            }


def event_rows(run_id: str, record: RolloutRecord) -> Iterator[Row]:
    """Yield the events of a planned rollout, in order."""
    at = record.times
    events: list[Row] = [{"event": "planned"}]
    events += [{"event": "session", "session_id": each} for each in record.session_ids]
    events += [{"event": event} for event in at if event in ("invoked", "accepted", "result")]
    if record.outcome is not None:
        events.append({"event": "settled", **_ending(record)})
    for number, event in enumerate(events):
        when = at.get(event["event"])
        times = {"at": _time(when), "after_s": when - record.planned_at} if when is not None else {}
        yield {**_key(run_id, record), "number": number, **times, **event}


def step_row(run_id: str, step: StepData, prices: Prices | None = None) -> Row:
    """Return the row of a step. Values from its report are null if it was interrupted."""
    cost, report, summary = step.cost(prices), step.read_report(), step.summary
    completed = summary.completed_rewards
    return {
        "run_id": run_id,
        "step": step.step,
        "name": step.name,
        "validates": step.validates,
        "planned": summary.planned,
        **{outcome: summary.outcomes.get(outcome, 0) for outcome in Outcome},
        "trainable": sum(record.trainable for record in step.read_records()),
        "mean_reward": summary.completed_reward_sum / completed if completed else None,
        **(_of_report(report) if report is not None else {}),
        "cost_dollars": cost.total if cost is not None else None,
        "wasted_dollars": cost.wasted if cost is not None else None,
    }


def _of_report(report: StepReport) -> Row:
    return {
        **{name: getattr(report, name) for name in _OF_REPORT},
        "groups": len(report.groups),
        "groups_usable": sum(group.usable for group in report.groups),
        "groups_with_spread": sum(group.has_spread for group in report.groups),
        "mean_staleness": report.staleness.mean if report.staleness is not None else None,
        "max_staleness": report.staleness.max if report.staleness is not None else None,
        "seconds": report.seconds,
        "deadline_reached": report.deadline_reached,
    }


def _texts(reply: Mapping[str, Any]) -> Row:
    calls = reply.get("tool_calls")
    return {
        "reasoning": text_of(reply.get("reasoning_content")) or None,
        "text": text_of(reply.get("content")),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
    }


def _key(run_id: str, record: RolloutRecord) -> Row:
    return {
        "run_id": run_id,
        "step": record.step,
        "rollout_id": record.rollout_id,
        "task_id": record.task_id,
    }


def _ending(record: RolloutRecord) -> Row:
    return {"outcome": record.outcome, "reason": record.reason or None, "message": record.message or None}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
