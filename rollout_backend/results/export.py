"""Export a run's tables to files.

Invariants:

- Memory holds only the records of one step and `max_rows` rows of each table, whatever the size of the run.
- The files of an earlier export are replaced once all new ones are complete. A failed export leaves no files.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend import aws
from rollout_backend.atomic_file import write_file
from rollout_backend.config.results import AwsConfig
from rollout_backend.errors import ConfigError
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.cost import Prices
from rollout_backend.results.run_data import read_config, read_rollout, read_run_id, read_steps
from rollout_backend.results.tables import (
    SCHEMAS,
    TABLES_VERSION,
    Row,
    event_rows,
    rollout_row,
    step_row,
    turn_rows,
)

TableFormat = Literal["parquet", "csv", "jsonl"]


def export_run(run_dir: Path, to: TableFormat, out: Path, *, max_rows: int = 5000) -> dict[Path, int]:
    """Write the tables of a run and `schema.json` into a folder. Return the number of rows of each table's file.

    `max_rows` is the number of rows of a table in memory and, with Parquet, in a row group.

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
        for step in read_steps(run_dir):
            for record in step.records:
                rollout = read_rollout(archive, record)
                tables["rollouts"].add([rollout_row(run_id, record, rollout)])
                tables["events"].add(event_rows(run_id, record))
                if rollout is not None:
                    tables["turns"].add(turn_rows(run_id, record, rollout))
            tables["steps"].add([step_row(run_id, step, prices)])
        for table in tables.values():
            table.close()
        for table in tables.values():
            table.part.replace(table.path)
        columns = {name: {field.name: str(field.type) for field in schema} for name, schema in SCHEMAS.items()}
        about = {"schema_version": TABLES_VERSION, "run_id": run_id, "tables": columns}
        write_file(out / "schema.json", json.dumps(about, indent=1).encode())
    return {table.path: table.rows for table in tables.values()}


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
        self._pending: list[Row] = []
        self._max_rows = max_rows
        parts.callback(self.part.unlink, missing_ok=True)
        self._writer = _open(self.part, self._schema, to)
        parts.callback(self._writer.close)

    def add(self, rows: Iterable[Row]) -> None:
        self._pending.extend(rows)
        if len(self._pending) >= self._max_rows:
            self._write()

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _write(self) -> None:
        if self._pending:
            self._writer.write_batch(pa.RecordBatch.from_pylist(self._pending, self._schema))
        self.rows += len(self._pending)
        self._pending = []


def _open(path: Path, schema: pa.Schema, to: TableFormat) -> _Writer:
    if to == "parquet":
        writer: _Writer = pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
    elif to == "csv":
        writer = pyarrow.csv.CSVWriter(path, schema)
    else:
        writer = _JsonLines(path)
    return writer


class _JsonLines:
    """Writes one JSON object per line, with times in ISO 8601."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def write_batch(self, batch: Any) -> None:
        for row in batch.to_pylist():
            self._file.write(f"{json.dumps(row, ensure_ascii=False, default=_iso)}\n")

    def close(self) -> None:
        self._file.close()


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="microseconds")


SCHEME = "s3://"


@dataclass(frozen=True)
class S3Folder:
    """A prefix of a bucket."""

    bucket: str
    prefix: str  # empty, or ends in a slash

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse `s3://BUCKET/PREFIX`; the prefix is optional.

        Raises:
            ConfigError: the URL names no bucket.
        """
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        if not bucket:
            raise ConfigError(f"{url} names no bucket: it must be s3://BUCKET/PREFIX")
        prefix = prefix.strip("/")
        return cls(bucket, f"{prefix}/" if prefix else "")

    def url_of(self, file: Path) -> str:
        """Return the URL of an uploaded file."""
        return f"{SCHEME}{self.bucket}/{self.prefix}{file.name}"

    async def upload(self, files: Iterable[Path], config: AwsConfig) -> None:
        """Upload files one by one. Each one replaces the object of its name once it is complete.

        Raises:
            ConfigError: S3 refuses a file; says why.
        """
        async with aws.client("s3", region=config.region, endpoint_url=config.endpoint_of("s3"), retries=4) as s3:
            for file in files:
                try:
                    await s3.upload_file(str(file), self.bucket, f"{self.prefix}{file.name}")
                except (ClientError, BotoCoreError) as error:
                    raise ConfigError(str(aws.preflight_error(error, f"bucket {self.bucket}", "--out"))) from None
