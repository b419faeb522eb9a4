"""`rollout show`: one rollout for reading."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.cli.common import console, exit_codes
from rollout_backend.errors import ConfigError


def show(
    rollout_id: Annotated[str, typer.Argument(help="As in the report, e.g. task-00003.1")],
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder. Default: the newest in ./runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole object as JSON.")] = False,
) -> None:
    """Show one rollout: its outcome, its conversation, its turns."""
    with exit_codes():
        _show(rollout_id, run_dir, as_json)


def _show(rollout_id: str, run_dir: Path | None, as_json: bool) -> None:
    from rollout_backend.observe.archive import RunArchive
    from rollout_backend.observe.view import print_rollout

    folder = run_dir or _newest_run(Path("runs"))
    found = RunArchive(folder).find_rollout(rollout_id)
    if not found:
        raise ConfigError(f"{folder} holds no rollout {rollout_id!r}; name another run with --run-dir")
    for path in found:
        try:
            rollout = Rollout.decode(path.read_bytes())
        except ContractError as error:
            raise ConfigError(f"{path} is not a rollout: {error}") from None
        if as_json:
            print(rollout.to_json().decode())
        else:
            print_rollout(console, rollout)


def _newest_run(runs: Path) -> Path:
    folders = [path for path in runs.glob("*") if (path / "rollouts").is_dir()]
    if not folders:
        raise ConfigError(f"there is no run in {runs.absolute()}: name one with --run-dir")
    return max(folders, key=lambda path: path.stat().st_mtime)
