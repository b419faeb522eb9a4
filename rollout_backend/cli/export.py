"""`rollout export`: a run as tables for pandas, polars and DuckDB."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_backend.cli.common import console, exit_codes, find_run, newest_run
from rollout_backend.errors import ConfigError


def export(
    run: Annotated[
        str | None, typer.Argument(help="The run: its id in ./runs, or its folder. Default: the newest in ./runs.")
    ] = None,
    to: Annotated[Literal["parquet", "csv", "jsonl"], typer.Option(help="The format of the files.")] = "parquet",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the files. Default: `tables` in the run's folder."),
    ] = None,
) -> None:
    """Write a run as tables: rollouts, turns, events and steps, for pandas, polars or DuckDB.

    docs/file-formats.md describes the columns. Files of an earlier export are replaced.
    """
    with exit_codes():
        folder = find_run(run) if run is not None else newest_run()
        try:
            from rollout_backend.report.export import export_run
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"rollout export needs {error.name}, which is not installed: install the extra trainer"
            ) from None
        try:
            written = export_run(folder, to, out or folder / "tables")
        except OSError as error:
            raise ConfigError(f"the tables of {folder} cannot be written: {error}") from None
        for path, rows in written.items():
            console.print(f"{path}: {rows:,} rows", markup=False, highlight=False, soft_wrap=True)
