"""`rollout report`: a run as one HTML file. `rollout compare`: how two runs differ."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from rollout_backend.cli.common import NewestRun, RunName, complete_run, console, exit_codes, find_run
from rollout_backend.errors import ConfigError


def report(
    run: NewestRun = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare with this run, task by task.", autocompletion=complete_run),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Follow the run in a browser until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="Address on which to serve.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port on which to serve. 0: any free port.")] = 8642,
) -> None:
    """Write a run's report: one HTML file, which needs no network.

    It shows what to look at first, every planned rollout, where the time went, and conversations with the
    probability of each token. The report of a training run starts with a page over all steps.

    With --serve, a browser shows the page and renews it as rollouts and steps end. Anyone who can reach the address
    can read the report, so it listens on 127.0.0.1 by default.
    """
    with exit_codes():
        folder = find_run(run)
        other = find_run(against) if against is not None else None
        if serve:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(_serve(folder, other, host, port))
            return
        from rollout_backend.results.page.report import write_report

        try:
            path = write_report(folder, other)
        except OSError as error:
            raise ConfigError(f"the report of {folder} cannot be written: {error}") from None
        console.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)


async def _serve(folder: Path, against: Path | None, host: str, port: int) -> None:
    from rollout_backend.results.page.report import ReportServer, serve_report

    async with serve_report(ReportServer(folder, against), host, port) as url:
        console.print(f"report: {url}", markup=False, highlight=False, soft_wrap=True)
        await asyncio.Event().wait()  # until Ctrl-C


def compare(
    first: RunName,
    second: Annotated[str, typer.Argument(metavar="RUN", help="Run to compare with.", autocompletion=complete_run)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Show how two runs differ: settings, versions, rewards by task, lengths and failures.

    The difference of the mean rewards is paired by task, with a 95% confidence interval.
    """
    with exit_codes():
        _compare(first, second, as_json)


def _compare(first: str, second: str, as_json: bool) -> None:
    from rollout_backend.results.comparison import compare_runs
    from rollout_backend.results.terminal.comparison_view import print_comparison

    found = compare_runs(find_run(first), find_run(second))
    print(found.model_dump_json()) if as_json else print_comparison(console, found)
