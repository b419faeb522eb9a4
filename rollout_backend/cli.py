"""`rollout`: the whole path on a laptop, rollouts without a trainer, and one rollout for reading.

Exit codes: 0, every step's ledger reconciles; 1, the run failed; 2, the input cannot be used and nothing was started;
130, interrupted, and everything that was started is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.errors import ConfigError, PreflightError, RolloutBackendError, TaskFileError
from rollout_backend.relay.cli import serve as serve_relay

if TYPE_CHECKING:
    from rollout_backend.serving.fleet import ServingEvent
    from rollout_backend.tasks import Task

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
engine_app = typer.Typer(no_args_is_help=True, help="The engine for machines without a GPU.")
app.add_typer(engine_app, name="engine")
console = Console()

Overrides = Annotated[
    list[str] | None, typer.Option("--override", "-o", metavar="KEY=VALUE", help="A setting, e.g. group.size=8.")
]
TaskFile = Annotated[Path, typer.Option("--tasks", help="JSONL or parquet: `payload`, and perhaps `task_id`.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Take only the first so many tasks.")]
EXAMPLE = Path("examples/arithmetic")


@app.command()
def demo(
    agent: Annotated[Path, typer.Option(help="The Python file that starts the agent's app.")] = EXAMPLE / "agent.py",
    tasks: TaskFile = EXAMPLE / "tasks.jsonl",
    limit: Limit = 16,
    config: Annotated[Path | None, typer.Option(help="Settings; bucket and runtime are the local cloud's.")] = None,
    servers: Annotated[int, typer.Option(min=1, help="SGLang servers.")] = 1,
    override: Overrides = None,
) -> None:
    """Runs an agent on this machine: real SGLang on the CPU, real router, local S3, SQS and AgentCore."""
    with _errors_told():
        _run(_demo(agent, tasks, limit, config, servers, override or []))


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Settings in YAML.")],
    tasks: TaskFile,
    limit: Limit = None,
    override: Overrides = None,
) -> None:
    """Rolls out every task once and reports: rollouts without a trainer, which is evaluation."""
    with _errors_told():
        settings = load_config(config, override or [])
        _run(_collect(settings, _read(tasks, limit)))


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="Settings in YAML.")],
    override: Overrides = None,
) -> None:
    """Looks whether a run could start: settings, credentials, bucket, queue, runtime. Starts nothing."""
    with _errors_told():
        _run(_check(load_config(config, override or [])))


@app.command()
def show(
    rollout_id: Annotated[str, typer.Argument(help="As in the report, e.g. task-00003.1")],
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder. Default: the newest in ./runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole object as JSON.")] = False,
) -> None:
    """One rollout, readable: its outcome, its conversation, its turns."""
    with _errors_told():
        _show(rollout_id, run_dir, as_json)


app.command("relay")(serve_relay)


@app.command()
def chaos(
    seeds: Annotated[int, typer.Option(min=1, help="How many histories.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one, and tell its whole history.")] = None,
    mutant: Annotated[str | None, typer.Option(help="Break the code on purpose; `list` names the ways.")] = None,
) -> None:
    """Plays simulated runs in which everything goes wrong, and checks that no promise is broken."""
    with _errors_told():
        _chaos(range(first, first + seeds), seed, mutant)


@engine_app.command("install")
def engine_install(
    torch_index_url: Annotated[str | None, typer.Option(help="Package index to take torch's CPU build from.")] = None,
) -> None:
    """Installs SGLang for the CPU in an environment of its own, and a small real model, into the cache folder."""
    from rollout_backend.serving.install import cache_dir, install_cpu_engine, prepare_model

    with _errors_told():
        python = install_cpu_engine(cache_dir(), torch_index_url=torch_index_url, echo=console.print)
        model = prepare_model(cache_dir(), echo=console.print)
        console.print(f"engine: {python}\nmodel: {model}", soft_wrap=True)


def main() -> None:
    logging.basicConfig(
        level=os.environ.get("ROLLOUT_LOG_LEVEL", "WARNING").upper(),
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    app()


# --- what the commands do ---------------------------------------------------------------------------------


async def _demo(
    agent: Path, tasks: Path, limit: int | None, config: Path | None, servers: int, overrides: Sequence[str]
) -> bool:
    from rollout_backend.local.cloud import LocalCloud
    from rollout_backend.serving.install import cache_dir, install_cpu_engine, prepare_model

    wanted = _read(tasks, limit)
    install_cpu_engine(cache_dir(), echo=console.print)
    model = prepare_model(cache_dir(), echo=console.print)
    base = {
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "servers": servers, "threads": max(1, ((os.cpu_count() or 2) - 1) // servers)},
        "group": {"size": 4},
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "timeouts": {"model_call_s": 120, "agent_s": 240, "publish_grace_s": 60, "collection_s": 600, "token_s": 900},
    }
    placeholder = {"storage": {"bucket": "rollouts"}, "runtime": {"kind": "http", "url": "http://127.0.0.1"}}
    early = load_config(config, overrides, base=base, top=placeholder)  # what is wrong shows before the cloud starts
    async with LocalCloud(agent, run_dir=early.run_dir / "logs", bucket=early.storage.bucket) as cloud:
        os.environ.update(cloud.environ)
        settings = load_config(config, overrides, base=base, top={"run_id": early.run_id, **cloud.settings()})
        balanced = await _collect(settings, wanted)
        sessions = (await cloud.sessions())["sessions"]
        console.print(f"the runtime itself counts {len(sessions)} open sessions")
        return balanced and not sessions


async def _collect(config: RolloutConfig, tasks: Sequence[Task]) -> bool:
    """One step, shown while it runs and told when it is over. True if its ledger reconciles."""
    from rollout_backend.manager import RolloutManager
    from rollout_backend.observe.progress import show_progress
    from rollout_backend.observe.view import print_step

    def status(text: str) -> None:
        console.print(f"[dim]{text}[/]")

    async with RolloutManager(config, on_status=status, on_serving=_tell_serving) as manager:
        rollouts = sum(task.rollouts or config.group.size for task in tasks)
        status(f"run {config.run_id}: {len(tasks)} tasks, {rollouts} rollouts")
        progress = asyncio.create_task(show_progress(manager, console))
        try:
            result = await manager.collect(tasks)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        print_step(console, result, config.run_dir)
        return result.report.balanced


async def _check(config: RolloutConfig) -> bool:
    from rollout_backend import preflight

    await preflight.check(config, console.print)
    return True


def _show(rollout_id: str, run_dir: Path | None, as_json: bool) -> None:
    from rollout_backend.observe.archive import RunArchive
    from rollout_backend.observe.view import print_rollout

    folder = run_dir or _newest_run(Path("runs"))
    found = RunArchive(folder).find(rollout_id)
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


def _chaos(seeds: range, one: int | None, mutant: str | None) -> None:
    from rich.progress import Progress

    from rollout_backend.sim.chaos import chaos, play
    from rollout_backend.sim.mutants import MUTANTS

    if mutant is not None and mutant not in MUTANTS:
        for name, make in MUTANTS.items():
            console.print(f"[bold]{name}[/] {make.__doc__}")
        if mutant == "list":
            return
        raise ConfigError(f"there is no mutant {mutant!r}: see above")
    if one is not None:
        verdict = play(one, mutant)
        console.print("\n".join(verdict.history), markup=False, highlight=False)
    else:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("seeds", total=len(seeds))
            tally = chaos(seeds, mutant, on_verdict=lambda _: progress.advance(bar))
        if tally.failed is None:
            told = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.outcomes.items() if count)
            console.print(
                f"{tally.seeds:,} seeds, {tally.lives:,} lives of a trainer, no promise broken; rollouts: {told}"
            )
            return
        verdict = tally.failed
    if verdict.broken is not None:
        extra = f" --mutant {mutant}" if mutant else ""
        console.print(f"[red]seed {verdict.seed}: {verdict.broken}[/]", highlight=False)
        if one is None:
            console.print(f"its history: rollout chaos --seed {verdict.seed}{extra}", highlight=False)
        raise typer.Exit(1)


def _newest_run(runs: Path) -> Path:
    folders = [path for path in runs.glob("*") if (path / "rollouts").is_dir()]
    if not folders:
        raise ConfigError(f"there is no run in {runs.absolute()}: name one with --run-dir")
    return max(folders, key=lambda path: path.stat().st_mtime)


def _read(tasks: Path, limit: int | None) -> Sequence[Task]:
    from rollout_backend.tasks import read_tasks

    return read_tasks(tasks)[:limit]


def _tell_serving(event: ServingEvent) -> None:
    console.print(f"[dim]{event.server}: {event.kind}[/] {event.detail}", soft_wrap=True)


# --- how they end -----------------------------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, bool]) -> None:
    """Runs it to its end. SIGTERM is taken as Ctrl-C is: everything that was started is stopped first."""

    async def with_signals() -> bool:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    if not asyncio.run(with_signals()):
        raise typer.Exit(1)


@contextlib.contextmanager
def _errors_told() -> Any:
    try:
        yield
    except (ConfigError, TaskFileError, PreflightError) as error:
        _tell(error)
        raise typer.Exit(2) from None
    except RolloutBackendError as error:
        _tell(error)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; everything that was started is stopped")
        raise typer.Exit(130) from None


def _tell(error: Exception) -> None:
    console.print("[red]error:[/] ", end="")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
