"""Commands that read the runs of a folder: `rollout ls` lists them, `report` makes one HTML file of a run,
`compare` shows how two runs differ, `export` writes tables for pandas, polars and DuckDB or logs of Inspect,
`replay` rebuilds a step's training rows without any agent, and `rescore` computes the rewards of stored rollouts
again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout_backend.cli.common import (
    RUNS,
    NewestRun,
    RunName,
    StepName,
    complete_run,
    console,
    echo,
    errors,
    find_run,
    show_progress,
)
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.views.replay import ReplayedStep

ExportFormat = Literal["parquet", "csv", "jsonl", "inspect"]


def ls(
    runs: Annotated[Path, typer.Argument(help="Folder with the run folders.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the runs, the newest first: when they began, their state, what completed, and the mean reward."""
    from rich.text import Text

    from rollout_backend.views.run_data import list_runs
    from rollout_backend.views.terminal.live_view import one_line
    from rollout_backend.views.terminal.view import plain_table, when

    found = list_runs(runs)
    if as_json:
        for run in found:
            print(run.model_dump_json())
        return
    if not found:
        raise ConfigError(f"there is no run in {runs.absolute()}: name the folder of the runs")
    table = plain_table("run", "began (UTC)", "state")
    for column in table.columns:
        column.no_wrap = True
    # The other commands take the beginning of an id. The rest of a line has some 20 columns.
    table.columns[0].max_width = max(24, console.width - 55)
    table.add_column(Text("completed, mean reward, error", no_wrap=True, overflow="ellipsis"))
    for run in found:
        counts = f"{run.completed}/{'?' if run.planned is None else run.planned}"
        facts = [counts if run.steps == 1 else f"{counts} in {run.steps} steps"] if run.steps or not run.error else []
        facts += [f"{run.mean_reward:.3f}"] if run.mean_reward is not None else []
        facts += [f"since {when(run.seen_at or 0.0)}"] if run.state == "silent" else []
        facts += [one_line(run.error)] if run.error else []
        table.add_row(
            Text(one_line(run.run_id)),
            "" if run.began is None else f"{datetime.fromtimestamp(run.began, UTC):%Y-%m-%d %H:%M}",
            Text(run.state, _STYLES.get(run.state, "")),
            # One line for each run: the end of a long error is cut on a terminal.
            Text(", ".join(facts), no_wrap=True, overflow="ellipsis"),
        )
    console.print(table)


_STYLES = {"running": "cyan", "failed": "red", "killed": "red", "silent": "red", "interrupted": "yellow"}


def report(
    run: NewestRun = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare with this run, task by task.", autocompletion=complete_run),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Follow the run in a browser until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="Address on which to serve.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which to serve. 0: any free port.")] = 8642,
) -> None:
    """Write a run's report: one HTML file, which needs no network.

    It shows what to look at first, every planned rollout, where the time went, and conversations with the
    probability of each token. The report of a training run starts with a page over all steps.

    With --serve, a browser shows the page and renews it as rollouts and steps end. Anyone who can reach the address
    can read the report, so it listens on 127.0.0.1 by default.
    """
    from rollout_backend.views.page.report import write_report

    folder = find_run(run)
    other = find_run(against) if against is not None else None
    if serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(folder, other, host, port, follow=run is None))
        return
    try:
        path = write_report(folder, other)
    except OSError as error:
        raise ConfigError(f"the report of {folder} cannot be written: {error}") from None
    echo(f"report: {path}")


async def _serve(folder: Path, against: Path | None, host: str, port: int, *, follow: bool) -> None:
    from rollout_backend.views.page.report import ReportServer, serve_report

    server = ReportServer(folder, against, newest=(lambda: find_run(None)) if follow else None)
    async with serve_report(server, host, port) as url:
        echo(f"report: {url}{' (follows the newest run)' if follow else ''}")
        # Serve until Ctrl-C.
        await asyncio.Event().wait()


def compare(
    first: RunName,
    second: Annotated[str, typer.Argument(metavar="RUN", help="Run to compare with.", autocompletion=complete_run)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Show how two runs differ: settings, versions, rewards by task, lengths and failures.

    The difference of the mean rewards is paired by task, with a 95% confidence interval.
    """
    from rollout_backend.views.comparison import compare_runs
    from rollout_backend.views.terminal.view import print_comparison

    found = compare_runs(find_run(first), find_run(second))
    print(found.model_dump_json()) if as_json else print_comparison(console, found)


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
    folder = find_run(run)
    default = folder / ("inspect" if to == "inspect" else "tables")
    try:
        if out is not None and "://" in out:
            _print_counts(_export_to_s3(folder, to, out))
        else:
            _print_counts(_export(folder, to, default if out is None else Path(out)))
    except OSError as error:
        raise ConfigError(f"the export of {folder} cannot be written: {error}") from None


def _export(folder: Path, to: ExportFormat, out: Path) -> dict[Path, int]:
    """Write the files. Return the number of rows or samples in each."""
    if to == "inspect":
        from rollout_backend.views.inspect_logs import export_inspect_logs

        return export_inspect_logs(folder, out)
    from rollout_backend.views.export import export_run

    with show_progress("read") as follow:
        return export_run(folder, to, out, follow=follow)


def _export_to_s3(folder: Path, to: ExportFormat, url: str) -> dict[str, int]:
    """Write the files to a temporary folder, and upload them once all are complete."""
    from rollout_backend.config.results import AwsConfig
    from rollout_backend.views.export import SCHEME, parse_s3_folder, upload
    from rollout_backend.views.run_data import read_config

    (bucket, prefix), config = parse_s3_folder(url), read_config(folder)
    with tempfile.TemporaryDirectory(prefix="rollout-export-") as temporary:
        written = _export(folder, to, Path(temporary))
        files = sorted(Path(temporary).iterdir())
        asyncio.run(upload(files, bucket, prefix, config.aws if config is not None else AwsConfig()))
    return {f"{SCHEME}{bucket}/{prefix}{path.name}": count for path, count in written.items()}


def _print_counts(written: Mapping[Path, int] | Mapping[str, int]) -> None:
    for place, number in written.items():
        unit = "samples" if str(place).endswith(".eval") else "rows"
        echo(f"{place}: {number:,} {unit}")


def replay(
    run: NewestRun = None,
    step: StepName = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.parquet", help="Write the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the digests as JSON.")] = False,
) -> None:
    """Rebuild the training rows of a step from its stored results, byte for byte.

    It checks every result, and prints a digest of each rollout's rows and of the step's. The exit code is 1 if a
    result fails its check; then no rows are written.
    """
    from rollout_backend.base.atomic_file import write_file
    from rollout_backend.views.replay import replay_step, rows_as_parquet

    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out {out} must be a .parquet file")
    found = replay_step(find_run(run), step)
    _print_digests_as_json(found) if as_json else _print_digests(found)
    for rollout_id, problem in found.failures.items():
        errors.print(f"{rollout_id}: {problem}", markup=False, highlight=False, soft_wrap=True)
    if found.failures:
        errors.print(f"{len(found.failures)} stored results failed their check, so the step's rows are incomplete")
        raise typer.Exit(1)
    if out is None:
        return
    try:
        write_file(out, rows_as_parquet(found.rollouts))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    if not as_json:
        echo(f"rows: {out}")


def _print_digests(found: ReplayedStep) -> None:
    from rollout_backend.views.replay import rollout_digest, step_digest
    from rollout_backend.views.terminal.view import print_words

    lines = [f"{rollout.rollout_id}: {rollout_digest(rollout)}" for rollout in found.rollouts]
    rows = sum(len(rollout.segments) for rollout in found.rollouts)
    sampled = sum(rollout.sampled_tokens for rollout in found.rollouts)
    lines.append(f"step {found.name}: {len(found.rollouts)} rollouts, {rows} rows, {sampled} sampled tokens")
    if not found.failures:
        lines += [f"digest of the step: {step_digest(found.rollouts)}", found.seals]
    for line in lines:
        echo(line)
    print_words(console, "seal")


def _print_digests_as_json(found: ReplayedStep) -> None:
    from rollout_backend.views.replay import rollout_digest, step_digest

    content = {
        "step": found.step,
        "digest": None if found.failures else step_digest(found.rollouts),
        "rollouts": {rollout.rollout_id: rollout_digest(rollout) for rollout in found.rollouts},
        "failures": found.failures,
        "seals": found.seals,
    }
    print(json.dumps(content, indent=1))


def rescore(
    scorer: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Function that takes a ScoreInput; see docs/rewards.md.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the new version. Default: the function's name and the time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every old and new reward as JSON.")] = False,
    run: NewestRun = None,
) -> None:
    """Compute the rewards of a run's completed rollouts again, and show old and new side by side.

    The new rewards are written to RUN/rescored/NAME. Nothing else in the run's folder changes. A rollout that cannot
    be scored has no new reward, and the exit code is then 1.
    """
    from rollout_backend.run.accounts.archive import RunArchive
    from rollout_backend.run.scoring.scorer import load_scorer
    from rollout_backend.views.rescoring import rescore as compute
    from rollout_backend.views.run_data import step_namer
    from rollout_backend.views.terminal.view import print_rescoring

    folder = find_run(run)
    with show_progress("scored") as follow:
        found = compute(folder, load_scorer(scorer), name, follow=follow)
    if as_json:
        print(found.model_dump_json()[:-1], end=',"rollouts":[')
        for number, each in enumerate(found.rollouts()):
            print("," * (number > 0) + each.model_dump_json(), end="")
        print("]}")
    else:
        print_rescoring(console, found, step_namer(RunArchive(folder)))
    if found.scored < found.completed:
        raise typer.Exit(1)
