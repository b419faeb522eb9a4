"""`rollout export`: a run as tables for pandas, polars and DuckDB, or as logs of Inspect."""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_backend.cli.common import NewestRun, console, exit_codes, find_run
from rollout_backend.errors import ConfigError

ExportFormat = Literal["parquet", "csv", "jsonl", "inspect"]


def export(
    run: NewestRun = None,
    to: Annotated[ExportFormat, typer.Option(help="File format.")] = "parquet",
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|S3_URL",
            help="Folder, or s3://BUCKET/PREFIX. Default: `tables` or `inspect` in the run's folder.",
        ),
    ] = None,
) -> None:
    """Write a run as tables: rollouts, turns, events and steps, for pandas, polars or DuckDB.

    With --to inspect, write a log for each step, for `inspect view`. docs/file-formats.md describes the columns and
    the logs. Files of an earlier export are replaced.
    """
    with exit_codes():
        folder = find_run(run)
        default = folder / ("inspect" if to == "inspect" else "tables")
        try:
            if out is not None and out.startswith("s3://"):
                _print(_export_to_s3(folder, to, out))
            else:
                _print(_export(folder, to, default if out is None else Path(out)))
        except OSError as error:
            raise ConfigError(f"the export of {folder} cannot be written: {error}") from None


def _export(folder: Path, to: ExportFormat, out: Path) -> dict[Path, int]:
    """Write the files. Return the number of rows or samples in each."""
    if to == "inspect":
        from rollout_backend.results.inspect_logs import export_inspect_logs

        return export_inspect_logs(folder, out)
    from rollout_backend.results.export import export_run

    return export_run(folder, to, out)


def _export_to_s3(folder: Path, to: ExportFormat, url: str) -> dict[str, int]:
    """Write the files to a temporary folder, and upload them once all are complete."""
    from rollout_backend.config.results import AwsConfig
    from rollout_backend.results.export import S3Folder
    from rollout_backend.results.run_data import read_config

    target, config = S3Folder.parse(url), read_config(folder)
    with tempfile.TemporaryDirectory(prefix="rollout-export-") as temporary:
        written = _export(folder, to, Path(temporary))
        files = sorted(Path(temporary).iterdir())
        asyncio.run(target.upload(files, config.aws if config is not None else AwsConfig()))
    return {target.url_of(path): count for path, count in written.items()}


def _print(written: Mapping[Path, int] | Mapping[str, int]) -> None:
    for place, number in written.items():
        unit = "samples" if str(place).endswith(".eval") else "rows"
        console.print(f"{place}: {number:,} {unit}", markup=False, highlight=False, soft_wrap=True)
