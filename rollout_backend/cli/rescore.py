"""`rollout rescore`: rewards of a run's stored rollouts, computed again."""

from typing import Annotated

import typer

from rollout_backend.cli.common import NewestRun, console, exit_codes, find_run


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
    with exit_codes():
        _rescore(run, scorer, name, as_json)


def _rescore(run: str | None, scorer: str, name: str | None, as_json: bool) -> None:
    from rollout_backend.results.rescoring import rescore
    from rollout_backend.results.terminal.comparison_view import print_rescoring
    from rollout_backend.scoring.scorer import load_scorer

    found = rescore(find_run(run), load_scorer(scorer), name)
    print(found.model_dump_json()) if as_json else print_rescoring(console, found)
    if found.failures:
        raise typer.Exit(1)
