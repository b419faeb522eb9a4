"""`rollout replay`: a step's training rows, rebuilt without any agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import NewestRun, console, errors, exit_codes, find_run
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.results.replay import ReplayedStep


def replay(
    run: NewestRun = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step number, as in the file names in steps/. Default: the only step.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.parquet", help="Write the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the digests as JSON.")] = False,
) -> None:
    """Rebuild the training rows of a step from its stored results, byte for byte.

    It checks every result, and prints a digest of each rollout's rows and of the step's. The exit code is 1 if a
    result fails its check; then no rows are written.
    """
    with exit_codes():
        _replay(run, step, out, as_json)


def _replay(run: str | None, step: int | None, out: Path | None, as_json: bool) -> None:
    from rollout_backend.atomic_file import write_file
    from rollout_backend.results.replay import replay_step, rows_as_parquet

    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out {out} must be a .parquet file")
    found = replay_step(find_run(run), step)
    _print_json(found) if as_json else _print(found)
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
        console.print(f"rows: {out}", markup=False, highlight=False, soft_wrap=True)


def _print(found: ReplayedStep) -> None:
    from rollout_backend.results.replay import rollout_digest, step_digest

    lines = [f"{rollout.rollout_id}: {rollout_digest(rollout)}" for rollout in found.rollouts]
    rows = sum(len(rollout.segments) for rollout in found.rollouts)
    sampled = sum(rollout.sampled_tokens for rollout in found.rollouts)
    lines.append(f"step {found.step}: {len(found.rollouts)} rollouts, {rows} rows, {sampled} sampled tokens")
    if not found.failures:
        lines += [f"digest of the step: {step_digest(found.rollouts)}", found.seals]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_json(found: ReplayedStep) -> None:
    from rollout_backend.results.replay import rollout_digest, step_digest

    content = {
        "step": found.step,
        "digest": None if found.failures else step_digest(found.rollouts),
        "rollouts": {rollout.rollout_id: rollout_digest(rollout) for rollout in found.rollouts},
        "failures": found.failures,
        "seals": found.seals,
    }
    print(json.dumps(content, indent=1))
