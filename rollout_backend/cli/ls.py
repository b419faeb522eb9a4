"""`rollout ls`: the runs in a folder."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rollout_backend.cli.common import RUNS, console, exit_codes
from rollout_backend.errors import ConfigError


def ls(
    runs: Annotated[Path, typer.Argument(help="Folder with the run folders.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the runs, the newest first: when they began, their state, what completed, and the mean reward."""
    with exit_codes():
        _ls(runs, as_json)


def _ls(runs: Path, as_json: bool) -> None:
    from rich.text import Text

    from rollout_backend.results.run_data import list_runs
    from rollout_backend.results.terminal.view import plain_table

    found = list_runs(runs)
    if as_json:
        for run in found:
            print(run.model_dump_json())
        return
    if not found:
        raise ConfigError(f"there is no run in {runs.absolute()}: name the folder of the runs")
    numbers = ("steps", "completed", "mean reward")
    table = plain_table("run", "began (UTC)", "state", *numbers, "error", right=numbers)
    for run in found:
        table.add_row(
            run.run_id,
            "" if run.began is None else f"{datetime.fromtimestamp(run.began, UTC):%Y-%m-%d %H:%M}",
            f"[{_STYLES.get(run.state, 'none')}]{run.state}[/]",
            str(run.steps),
            f"{run.completed}/{'?' if run.planned is None else run.planned}",
            "" if run.mean_reward is None else f"{run.mean_reward:.3f}",
            Text(" ".join(run.error.split())),
        )
    console.print(table)


_STYLES = {"running": "cyan", "failed": "red", "killed": "red", "interrupted": "yellow"}
