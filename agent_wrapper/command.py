"""Run a command as an agent: any program that calls the model at the endpoint in its environment.

Invariants:

- The command and its children end with the call, also if the call is cancelled at the agent's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from agent_wrapper.context import RolloutContext
from agent_wrapper.errors import CommandError

_SHOWN_CHARS = 1_000


async def run_command(
    context: RolloutContext,
    command: Sequence[str],
    *,
    input: str = "",
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command to its end, and return what it wrote to stdout.

    Its environment is this process's, with `context.environ()` and `env` added. `input` is its stdin. When it ends,
    its stderr is written to the session's log and its children are killed.

    Raises:
        CommandError: its exit code is not 0.
        OSError: it cannot be started.
    """
    # Files instead of pipes: a child that keeps a pipe open would delay the end, and a cancelled read loses the log.
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(input.encode())
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={**os.environ, **context.environ(), **(env or {})},
            start_new_session=True,
        )
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            log = _read(stderr)
            sys.stderr.write(log)
        out = _read(stdout)
    if process.returncode:
        shown = log.strip()[-_SHOWN_CHARS:] or "it wrote nothing to stderr"
        raise CommandError(f"{command[0]} exited with code {process.returncode}: {shown}")
    return out


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
