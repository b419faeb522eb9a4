"""The `rollout` command line, one module per command or group of related commands.

Exit codes: 0, success; 1, the run failed; 2, the input is invalid and nothing was started; 3, the run ended with
nothing to train on, or with too few completed rollouts; 130, interrupted, and everything that was started is stopped.
"""

import io
import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.logging import RichHandler

from rollout_backend.base.local_keys import bypass_proxies
from rollout_backend.base.logs import configure_logs, select_json
from rollout_backend.cli.common import as_command, console, errors
from rollout_backend.cli.deploy import deploy, down, infra
from rollout_backend.cli.doctor import doctor
from rollout_backend.cli.laptop import demo, dev, engine_install, init
from rollout_backend.cli.results import compare, export, ls, replay, report, rescore
from rollout_backend.cli.run import run
from rollout_backend.cli.serve import serve
from rollout_backend.cli.show import show
from rollout_backend.cli.train import train
from rollout_backend.model.relay.cli import serve as relay

__all__ = ["app", "console", "main"]

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_HELP_NAMES = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", context_settings=_HELP_NAMES
)
for command in (
    init,
    dev,
    demo,
    deploy,
    doctor,
    run,
    train,
    down,
    ls,
    show,
    report,
    compare,
    export,
    replay,
    rescore,
    serve,
):
    app.command()(as_command(command))
app.command("relay", rich_help_panel="Advanced")(relay)
app.command(rich_help_panel="Advanced")(as_command(infra))
engine_app = typer.Typer(no_args_is_help=True, help="Install an engine for machines without a GPU.")
engine_app.command("install")(as_command(engine_install))
app.add_typer(engine_app, name="engine")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rollout-backend {version('rollout-backend')}")
        raise typer.Exit


def _turn_off_color(wanted: bool) -> None:
    if wanted:
        # The help and the processes that this one starts read the variable.
        os.environ["NO_COLOR"] = "1"
        console.no_color = errors.no_color = True


def _log_json(wanted: bool) -> None:
    if wanted:
        select_json()
        configure_logs(logging.getLogger().level)


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    _no_color: Annotated[
        bool,
        typer.Option("--no-color", callback=_turn_off_color, is_eager=True, help="Print no colors, like NO_COLOR=1."),
    ] = False,
    _json: Annotated[
        bool,
        typer.Option(
            "--log-json", callback=_log_json, is_eager=True, help="Log one JSON object per line, on stderr."
        ),
    ] = False,
) -> None:
    """Run rollouts of an agent against your model, and examine them.

    Exit codes: 0, success; 1, the run failed; 2, the input is invalid and nothing was started; 3, the run ended with
    nothing to train on, or with too few completed rollouts; 130, interrupted, and everything that was started is
    stopped.
    """
    # This process does not use torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def main() -> None:
    level = os.environ.get("ROLLOUT_LOG_LEVEL", "WARNING").upper()
    if level not in _LOG_LEVELS:
        errors.print(f"[red]error:[/] ROLLOUT_LOG_LEVEL={level} is none of {', '.join(_LOG_LEVELS)}")
        raise SystemExit(2)
    bypass_proxies()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the encoding lacks must not end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = RichHandler(console=errors, show_path=False) if errors.is_terminal else None
    configure_logs(level, handler, collapse=True)
    app()
