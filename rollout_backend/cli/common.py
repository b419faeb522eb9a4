"""The console, common options, and exit codes of the commands."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console

from agent_wrapper.contract import readable
from rollout_backend.config import RolloutConfig, RuntimeConfig, load_config, merge_overrides
from rollout_backend.errors import ConfigError, PreflightError, RolloutBackendError, TaskFileError
from rollout_backend.views.terminal.keys import restore_terminals

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task
    from rollout_backend.views.terminal.run_output import RunOutput

_P = ParamSpec("_P")
# A pipe has no width, and tools that read it need whole lines.
_PIPE_WIDTH = 1000


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that wraps lines only on a terminal."""
    # rich would otherwise show the `:100:` of a line number as an emoji.
    console = Console(stderr=stderr, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


console = make_console()
errors = make_console(stderr=True)
if console.is_terminal and errors.is_terminal:
    # Lines from another console would corrupt a live display.
    errors = console

_OF_THE_MACHINE = {
    errno.ENOSPC: "Free space on that disk, or set output_dir to a folder on another one",
    errno.EDQUOT: "Your disk quota is used up: free space, or set output_dir to a folder on another disk",
    errno.EROFS: "Set output_dir to a folder that can be written",
    errno.EACCES: "Change the permissions, or set output_dir to a folder that you may write",
    errno.EPERM: "Change the permissions, or set output_dir to a folder that you may write",
    errno.EMFILE: "Raise the limit of open files: ulimit -n",
    errno.ENOMEM: "This machine has too little memory",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
        "Correct the path, or the setting that names it",
    ),
}
"""What to do about errors of the operating system. Other errors are bugs of this package."""


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on a terminal. Call the yielded function with the numbers of finished and of all rollouts."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress("{task.description}", MofNCompleteColumn(), TimeRemainingColumn(), console=errors) as progress:
        task = progress.add_task(f"rollouts {what}", visible=errors.is_terminal)
        yield lambda done, total: progress.update(task, completed=done, total=total)


RUNS = Path("runs")
"""The default of `output_dir`, where commands look for runs."""


def complete_run(incomplete: str) -> list[str]:
    """Return the ids in ./runs that start with `incomplete`, newest first, for shell completion."""
    found = [path for path in RUNS.glob("*") if path.name.startswith(incomplete) and (path / "steps").is_dir()]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run id in ./runs, a prefix of it, or a run folder.", autocompletion=complete_run
    ),
]
NewestRun = Annotated[
    str | None,
    typer.Argument(
        help="Run id in ./runs, a prefix of it, or a run folder. Default: the newest run in ./runs.",
        autocompletion=complete_run,
    ),
]
StepName = Annotated[
    str | None,
    typer.Option(
        "--step", metavar="STEP", help="Only the step with this number; in a training, the trainer's number."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--override", "-o", metavar="KEY=VALUE", help="Override a setting, such as group.size=8."),
]
TaskFile = Annotated[
    Path | None,
    typer.Option("--tasks", help="JSONL or parquet with `payload` and optional `task_id`, or harbor:FOLDER."),
]
ScorerOption = Annotated[
    str | None,
    typer.Option(
        "--scorer", metavar="FILE.py:FUNCTION", help="Function that computes the rewards: scoring.function."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the summary at the end.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print the ledger and the reward of each group.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N tasks.")]


def with_scorer(overrides: list[str] | None, scorer: str | None) -> list[str]:
    """Return the overrides with those of `--scorer`."""
    return [*(overrides or []), *([f"scoring.function={scorer}"] if scorer is not None else [])]


SERVICE_SAMPLES = "serving={kind: tinker}"
"""The override of a training on a service, whose samples answer all model calls."""


def echo(text: str) -> None:
    """Print a line unchanged."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


Stack = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Take bucket, queue, runtime and gateway from a CloudFormation stack."),
]


async def load_settings(config: Path | None, overrides: Sequence[str], stack: str | None) -> RolloutConfig:
    """Read the settings of a run. Those of a stack replace the file's, and the overrides replace both.

    Raises:
        ConfigError: the settings are invalid.
        PreflightError: the stack does not exist, or has no runtime yet.
    """
    if stack is None:
        return load_config(config, overrides)
    from rollout_backend.workbench.deploy.target import find_deployed, read_stack

    top = (await find_deployed(await read_stack(stack))).settings()
    merge_overrides(top, overrides)
    return load_config(config, top=top)


def read_limited(tasks: Path, limit: int | None, runtime: RuntimeConfig) -> Sequence[Task]:
    """Read the first tasks of a file that `runtime` can run."""
    from rollout_backend.core.tasks import read_tasks

    return read_tasks(tasks, runtime)[:limit]


def run_output(quiet: bool, verbose: bool, as_json: bool) -> RunOutput:
    """Return the object that prints a run.

    Raises:
        ConfigError: more than one of the options is set.
    """
    from rollout_backend.views.terminal.run_output import RunOutput

    if quiet + verbose + as_json > 1:
        raise ConfigError("choose one of --quiet, --verbose and --json")
    return RunOutput(console, "quiet" if quiet else "verbose" if verbose else "json" if as_json else "normal")


def find_run(name: str | None) -> Path:
    """Return the directory of a run, given by its id in ./runs, by a unique prefix of its id, or by its path. Without
    a name, return the most recently active run with records: a run that failed to start has none.

    Raises:
        ConfigError: the run does not exist, or several ids start with the name.
    """
    if name is None:
        active = {
            path: max(part.stat().st_mtime for part in parts)
            for path in RUNS.glob("*")
            if (parts := [path / part for part in ("rollouts", "steps") if any((path / part).glob("*"))])
        }
        if not active:
            raise ConfigError(
                f"there is no run in {RUNS.absolute()}: name a run's folder (`rollout show`: with --run)"
            )
        return max(active, key=active.__getitem__)
    if not name:
        # The name may be a shell variable that is not set.
        raise ConfigError("the name of the run is empty")
    for folder in (RUNS / name, Path(name)):
        # `RUNS / "."` is RUNS, but `.` names the current folder.
        if folder.is_dir() and folder != RUNS:
            return folder
    found = sorted(path for path in RUNS.glob("*") if path.name.startswith(name) and path.is_dir())
    if len(found) > 1:
        raise ConfigError(f"several runs begin with {name!r}: {', '.join(path.name for path in found[:5])}")
    if not found:
        raise ConfigError(f"there is no run {name!r}: {(RUNS / name).absolute()} is no folder")
    return found[0]


def as_command(function: Callable[_P, object]) -> Callable[_P, None]:
    """Return a function for the command line: it prints this package's errors and exits with their codes.

    A coroutine runs in an event loop; its result is the exit code.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **options: _P.kwargs) -> None:
        with exit_codes():
            work = function(*args, **options)
            if asyncio.iscoroutine(work):
                run_async(work)

    return run


def run_async(work: Coroutine[Any, Any, int]) -> None:
    """Run a coroutine, and exit with the code that it returns.

    The first Ctrl-C or SIGTERM cancels it, so that it stops what it started. The second one ends this process
    immediately, like a kill: the guards of its servers and the janitor stop the rest.
    """

    async def with_signals() -> int:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def interrupt() -> None:
            if not task.cancelling():
                errors.print("interrupted: stopping what was started (interrupt again to exit at once)")
                task.cancel()
                return
            errors.print("interrupted again: exiting at once; the run's janitor stops its sessions")
            # A live display hides the cursor.
            console.show_cursor()
            restore_terminals()
            sys.stdout.flush()
            os._exit(130)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        return await work

    if code := asyncio.run(with_signals()):
        raise typer.Exit(code)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Print this package's errors, and exit with their codes."""
    try:
        yield
    except (ConfigError, TaskFileError, PreflightError) as error:
        _print_error(error)
        raise typer.Exit(2) from None
    except RolloutBackendError as error:
        _print_error(error)
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        _print_error(f"{place}{error.strerror}. {_OF_THE_MACHINE[error.errno]}")
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("interrupted; everything that was started is stopped")
        raise typer.Exit(130) from None


def _print_error(error: object) -> None:
    errors.print("[red]error:[/] ", end="")
    errors.print(readable(str(error)), markup=False, highlight=False, soft_wrap=True)
