"""What the commands share: the console, common options, and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rollout_backend.errors import ConfigError, PreflightError, RolloutBackendError, TaskFileError

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task

console = Console()

RUNS = Path("runs")
"""The default of `output_dir`, in which commands look for runs."""

Overrides = Annotated[
    list[str] | None, typer.Option("--override", "-o", metavar="KEY=VALUE", help="A setting, e.g. group.size=8.")
]
TaskFile = Annotated[Path, typer.Option("--tasks", help="JSONL or parquet with `payload` and optional `task_id`.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Take only this many tasks from the beginning.")]


def read_limited(tasks: Path, limit: int | None) -> Sequence[Task]:
    """Read the first tasks of a file."""
    from rollout_backend.core.tasks import read_tasks

    return read_tasks(tasks)[:limit]


def find_run(name: str) -> Path:
    """Return the folder of a run, named by its id in ./runs or by its path.

    Raises:
        ConfigError: there is no such folder.
    """
    for folder in (RUNS / name, Path(name)):
        if folder.is_dir():
            return folder
    raise ConfigError(f"there is no run {name!r}: {(RUNS / name).absolute()} is no folder")


def run_async(work: Coroutine[Any, Any, int]) -> None:
    """Run a coroutine, and exit with the code that it returns. SIGTERM cancels it, as Ctrl-C does."""

    async def with_signals() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    if code := asyncio.run(with_signals()):
        raise typer.Exit(code)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Print this package's errors and exit with their code."""
    try:
        yield
    except (ConfigError, TaskFileError, PreflightError) as error:
        _print_error(error)
        raise typer.Exit(2) from None
    except RolloutBackendError as error:
        _print_error(error)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; everything that was started is stopped")
        raise typer.Exit(130) from None


def _print_error(error: Exception) -> None:
    console.print("[red]error:[/] ", end="")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
