"""Run the relay: `python -m rollout_backend.model.relay`, with the key in the environment."""

from __future__ import annotations

import logging

import typer

from rollout_backend.base.logs import configure_logs
from rollout_backend.model.relay.cli import serve

if __name__ == "__main__":
    configure_logs(logging.WARNING, collapse=True)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    app()
