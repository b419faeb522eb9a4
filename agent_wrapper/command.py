"""Run a command as an agent: any program that calls the model at the endpoint in its environment.

Invariants:

- The command and its children end with the call, even if the call is cancelled at the agent's deadline. On Linux,
  this includes children that have left the command's process group.
- The command's output goes to the session's log as it is written, up to 16 MiB per stream. Memory holds the
  last `KEPT_BYTES` of stdout and the last `_SHOWN_BYTES` of stderr.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from agent_wrapper.context import RolloutContext
from agent_wrapper.contract import PAYLOAD_VARIABLE
from agent_wrapper.errors import CommandError, CommandNotStarted
from agent_wrapper.shared.child_output import ChildOutput
from agent_wrapper.shared.processes import (
    MARK,
    boot_clock,
    describe_exit,
    end_marked,
    kill_group,
    new_mark,
    wait_killed,
)
from agent_wrapper.shared.threads import in_thread

KEPT_BYTES = 16 * 1024 * 1024
_SHOWN_BYTES = 4_000
_SHOWN_CHARS, _SHOWN_STDOUT_CHARS = 1_000, 300


@dataclass(frozen=True)
class CommandResult:
    """A finished command. `stdout` and `stderr` hold the end of its output."""

    name: str
    exit_code: int
    """If a signal ended the command, the negative number of the signal."""
    stdout: str
    stderr: str
    truncated: bool
    """True if the command wrote more to stdout than `stdout` holds."""

    @property
    def failure(self) -> str | None:
        """Return None if the command exited with 0, else a description with the end of its output."""
        if not self.exit_code:
            return None
        shown = self.stderr.strip()[-_SHOWN_CHARS:] or "it wrote nothing to stderr"
        # Some command-line agents report errors on stdout.
        if end := self.stdout.strip()[-_SHOWN_STDOUT_CHARS:]:
            shown += f" (its stdout ends with: {end})"
        return f"{self.name} {describe_exit(self.exit_code)}: {shown}"


async def run_command(
    context: RolloutContext,
    command: Sequence[str],
    *,
    input: str = "",
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    keep_home: bool = False,
) -> str:
    """Run a command to its end, and return its stdout.

    Its environment is this process's, plus `context.environ()`, which takes `keep_home`, and `env`. `input` is its
    stdin. Its stderr goes to the session's log. When it ends, its children are killed.

    Raises:
        CommandError: its exit code is not 0, or it wrote more than 16 MiB to stdout.
        CommandNotStarted: it cannot be started.
    """
    environ = {**context.environ(keep_home=keep_home), **(env or {})}
    result = await run_to_end(command, env=environ, input=input, cwd=cwd)
    if result.failure is not None:
        raise CommandError(result.failure)
    if result.truncated:
        raise CommandError(f"{result.name} wrote more than {KEPT_BYTES} bytes to stdout: let it write a file instead")
    return result.stdout


async def run_to_end(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    input: str = "",
    cwd: Path | str | None,
    log_stdout: bool = False,
) -> CommandResult:
    """Run a command to its end. Its environment is this process's, plus `env`.

    Raises:
        CommandNotStarted: it cannot be started.
    """
    mark, began_at = new_mark(), boot_clock()
    inherited = {name: value for name, value in os.environ.items() if name != PAYLOAD_VARIABLE}
    with (
        TemporaryFile() as stdin,
        _output(KEPT_BYTES, sys.stdout if log_stdout else None) as stdout,
        _output(_SHOWN_BYTES, sys.stderr) as stderr,
    ):
        stdin.write(input.encode(errors="replace"))
        stdin.seek(0)
        process: asyncio.subprocess.Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stdout.write_end,
                stderr=stderr.write_end,
                cwd=cwd,
                env={**inherited, **env, MARK: mark},
                start_new_session=True,
            )
            await process.wait()
        except OSError as error:
            raise CommandNotStarted(f"the command {command[0]!r} cannot be started: {error}") from error
        finally:
            if process is not None:
                kill_group(process.pid)
                await wait_killed(process, command[0])
            # Including processes that a cancelled call had started.
            await in_thread(lambda: end_marked(mark, began_at), "end-marked")
    assert process.returncode is not None
    return CommandResult(command[0], process.returncode, stdout.text(), stderr.text(), stdout.truncated)


@contextlib.contextmanager
def _output(kept_bytes: int, log: TextIO | None) -> Iterator[ChildOutput]:
    """Return a pipe whose output is logged as it arrives."""
    loop, decoder = asyncio.get_running_loop(), codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(data: bytes) -> None:
        if log is not None:
            log.write(decoder.decode(data))
            log.flush()

    with contextlib.closing(ChildOutput(kept_bytes, write)) as output:
        loop.add_reader(output.read_end, output.read)
        try:
            yield output
        finally:
            loop.remove_reader(output.read_end)
