"""`rollout run`: rollouts without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import Limit, Overrides, TaskFile, console, exit_codes, read_limited, run_async
from rollout_backend.config import RolloutConfig, load_config

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task
    from rollout_backend.serving.supervisor import ServingEvent


def run(
    config: Annotated[Path, typer.Argument(help="Settings in YAML.")],
    tasks: TaskFile,
    limit: Limit = None,
    override: Overrides = None,
) -> None:
    """Roll out every task once and report, without a trainer: an evaluation."""
    with exit_codes():
        settings = load_config(config, override or [])
        run_async(collect_step(settings, read_limited(tasks, limit)))


async def collect_step(
    config: RolloutConfig, tasks: Sequence[Task], wait_lost: Callable[[], Awaitable[None]] | None = None
) -> bool:
    """Run one step, show its progress and print its report. Return True if its ledger reconciles and every session
    is closed."""
    from rollout_backend.core.tasks import planned_rollouts
    from rollout_backend.manager import RolloutManager
    from rollout_backend.observe.live_view import show_progress
    from rollout_backend.observe.view import print_step

    rollouts = planned_rollouts(tasks, config.group)

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
        return result.report.balanced


def _print_event(event: ServingEvent) -> None:
    console.print(f"[dim]{event.server}: {event.kind}[/] {event.detail}", soft_wrap=True)
