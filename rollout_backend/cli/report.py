"""`rollout report`: a run as one HTML file."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_backend.cli.common import NewestRun, complete_run, console, exit_codes, find_run
from rollout_backend.errors import ConfigError


def report(
    run: NewestRun = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare with this run, task by task.", autocompletion=complete_run),
    ] = None,
) -> None:
    """Write a run's report: one HTML file, which needs no network.

    It shows what to look at first, every planned rollout, where the time went, and conversations with the
    probability of each token. The report of a training run starts with a page over all steps.
    """
    with exit_codes():
        folder = find_run(run)
        other = find_run(against) if against is not None else None
        from rollout_backend.results.page.files import write_report

        try:
            path = write_report(folder, other)
        except OSError as error:
            raise ConfigError(f"the report of {folder} cannot be written: {error}") from None
        console.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)
