"""`rollout run`: rollouts without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import Limit, Overrides, TaskFile, console, exit_codes, read_limited, run_async
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task
    from rollout_backend.serving.supervisor import ServingEvent


def run(
    config: Annotated[Path, typer.Argument(help="Settings in YAML.")],
    tasks: TaskFile,
    limit: Limit = None,
    min_completed: Annotated[
        int, typer.Option(min=0, help="Exit with code 3 if fewer rollouts than this complete.")
    ] = 0,
    override: Overrides = None,
) -> None:
    """Roll out every task once and report, without a trainer: an evaluation.

    The last lines are the verdict, which says why the run exits with 0 or 3.

    Exit codes: 0, there is something to train on; 1, the run failed; 2, the input is invalid, and nothing was
    started; 3, there is nothing to train on, or fewer rollouts completed than --min-completed; 130, interrupted.
    """
    with exit_codes():
        settings = load_config(config, override or [])
        run_async(collect_step(settings, read_limited(tasks, limit), min_completed=min_completed))


async def collect_step(
    config: RolloutConfig,
    tasks: Sequence[Task],
    wait_lost: Callable[[], Awaitable[None]] | None = None,
    min_completed: int = 0,
) -> int:
    """Run one step, show its progress, and print its report and verdict. Return the exit code.

    Raises:
        ConfigError: `min_completed` is more than the step plans.
    """
    from rollout_backend.core.tasks import planned_rollouts
    from rollout_backend.core.verdict import judge
    from rollout_backend.manager import RolloutManager
    from rollout_backend.observe.live_view import show_progress
    from rollout_backend.observe.view import print_step, print_verdict

    rollouts = planned_rollouts(tasks, config.group)
    if min_completed > rollouts:
        raise ConfigError(f"--min-completed={min_completed} is more than the {rollouts} rollouts that the run plans")

    def status(text: str) -> None:
        console.print(f"[dim]{text}[/]")

    async with RolloutManager(
        config, on_status=status, on_serving=_print_event, rollouts=rollouts, wait_lost=wait_lost
    ) as manager:
        status(f"run {config.run_id}: {len(tasks)} tasks, {rollouts} rollouts")
        progress = asyncio.create_task(show_progress(manager.progress, manager.config.timeouts.collection_s, console))
        try:
            result = await manager.collect(tasks)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        print_step(console, result, config.run_dir)
    verdict = judge(result.report, result.records, min_completed)
    print_verdict(console, verdict)
    if not result.report.balanced:
        return 1
    return 0 if verdict.passed else 3


def _print_event(event: ServingEvent) -> None:
    console.print(f"[dim]{event.server}: {event.kind}[/] {event.detail}", soft_wrap=True)
