"""`rollout compare`: how two runs differ."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_backend.cli.common import RunName, complete_run, console, exit_codes, find_run


def compare(
    first: RunName,
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another one.", autocompletion=complete_run)],
    as_json: Annotated[bool, typer.Option("--json", help="The whole comparison as JSON.")] = False,
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
