"""`rollout show`: one planned rollout for reading, also one that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.cli.common import console, exit_codes, newest_run
from rollout_backend.errors import ConfigError


def show(
    rollout_id: Annotated[str, typer.Argument(help="As in the report, e.g. task-00003.1")],
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder. Default: the newest in ./runs.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step, as its files in steps/ are named.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole result, or else the record, as JSON.")] = False,
) -> None:
    """Show one planned rollout: its outcome, conversation and turns, its attempts, sessions and log.

    Of a rollout without a result, it shows how and why it ended.
    """
    with exit_codes():
        _show(rollout_id, run_dir, step, as_json)


def _show(rollout_id: str, run_dir: Path | None, only: int | None, as_json: bool) -> None:
    from rollout_backend.observe.archive import RunArchive
    from rollout_backend.observe.view import print_record, print_rollout

    folder = run_dir or newest_run()
    archive = RunArchive(folder)
    try:
        records = {record.step: record for record in archive.find_records(rollout_id)}
    except ValueError as error:
        raise ConfigError(f"a record in {folder / 'steps'} cannot be read: {error}") from None
    rollouts = {rollout.step: rollout for rollout in map(_read_rollout, archive.find_rollout(rollout_id))}
    steps = sorted({*records, *rollouts} if only is None else {*records, *rollouts} & {only})
    if not steps:
        where = folder if only is None else f"step {only} of {folder}"
        raise ConfigError(f"{where} holds no rollout {rollout_id!r}; name another run with --run-dir")
    for step in steps:
        record, rollout = records.get(step), rollouts.get(step)
        if rollout is not None and record is not None and not record.is_of(rollout):
            rollout = None
        if rollout is not None:
            print(rollout.model_dump_json()) if as_json else print_rollout(console, rollout)
        elif record is not None and as_json:
            print(record.model_dump_json())
        if record is not None and not as_json:
            print_record(console, record, with_outcome=rollout is None)


def _read_rollout(path: Path) -> Rollout:
    try:
        return Rollout.decode(path.read_bytes())
    except ContractError as error:
        raise ConfigError(f"{path} is not a rollout: {error}") from None
