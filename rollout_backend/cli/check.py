"""`rollout check`: the preflight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import Limit, Overrides, console, exit_codes, read_limited, run_async
from rollout_backend.config import RolloutConfig, load_config

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task


def check(
    config: Annotated[Path, typer.Argument(help="Settings in YAML.")],
    tasks: Annotated[
        Path | None, typer.Option(help="Also check how long a step of these tasks takes to start.")
    ] = None,
    limit: Limit = None,
    override: Overrides = None,
) -> None:
    """Try the calls that a run makes to bucket, queue and runtime, with its credentials. Nothing is started."""
    with exit_codes():
        settings = load_config(config, override or [])
        run_async(_check(settings, None if tasks is None else read_limited(tasks, limit)))


async def _check(config: RolloutConfig, tasks: Sequence[Task] | None) -> int:
    from rollout_backend import preflight
    from rollout_backend.core.tasks import planned_rollouts

    rollouts = None if tasks is None else planned_rollouts(tasks, config.group)
    await preflight.check(config, console.print, rollouts)
    return 0
