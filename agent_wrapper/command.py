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

    Its environment is this process's, with `context.environ()` and `env` added. `input` is its stdin. Its stderr goes
    to the session's log. Its children are killed when it ends.

    Raises:
        CommandError: its exit code is not 0.
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, **context.environ(), **(env or {})},
        start_new_session=True,
    )
    try:
        out, log = (data.decode(errors="replace") for data in await process.communicate(input.encode()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    sys.stderr.write(log)
    if process.returncode:
        shown = log.strip()[-_SHOWN_CHARS:] or "it wrote nothing to stderr"
        raise CommandError(f"{command[0]} exited with code {process.returncode}: {shown}")
    return out
