"""`rollout show`: one planned rollout for reading, also one that failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.cli.common import console, exit_codes, newest_run
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.observe.archive import RunArchive


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
        rollouts = {rollout.step: rollout for rollout in map(_read_rollout, archive.find_rollout(rollout_id))}
        steps = sorted({*records, *rollouts} if only is None else {*records, *rollouts} & {only})
        nearest = None if steps else _nearest(rollout_id, archive, archive.steps() if only is None else [only])
    except ValueError as error:
        raise ConfigError(f"a record in {folder / 'steps'} cannot be read: {error}") from None
    if not steps:
        where = folder if only is None else f"step {only} of {folder}"
        advice = f"did you mean {nearest}? Or name" if nearest else "name"
        raise ConfigError(f"{where} holds no rollout {rollout_id!r}; {advice} another run with --run-dir")
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


def _nearest(wanted: str, archive: RunArchive, steps: Iterable[int]) -> str | None:
    """Return the planned rollout whose id is most similar, or the first one of the task whose id is."""
    rollouts: dict[str, str] = {}
    for step in steps:
        for record in archive.read_records(step):
            rollouts[record.rollout_id] = record.rollout_id
            rollouts.setdefault(record.task_id, record.rollout_id)
    similar = difflib.get_close_matches(wanted, rollouts, 1)
    return rollouts[similar[0]] if similar else None


def _read_rollout(path: Path) -> Rollout:
    try:
        return Rollout.decode(path.read_bytes())
    except ContractError as error:
        raise ConfigError(f"{path} is not a rollout: {error}") from None
