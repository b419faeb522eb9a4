"""Run a command as an agent: any program that calls the model at the endpoint in its environment.

Invariants:

- The command and its children end with the call, also if the call is cancelled at the agent's deadline. On Linux this
  includes children that have left the command's process group.
- What the command writes goes to the session's log as it is written, up to `_LOGGED_BYTES` of each stream. Memory
  holds the last `_KEPT_BYTES` of stdout and the last `_SHOWN_BYTES` of stderr.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from agent_wrapper.context import RolloutContext
from agent_wrapper.contract import PAYLOAD_VARIABLE
from agent_wrapper.errors import CommandError, CommandNotStarted
from agent_wrapper.shared.processes import describe_exit

_LOGGED_BYTES = 16 * 1024 * 1024
_KEPT_BYTES = 16 * 1024 * 1024
_SHOWN_BYTES = 4_000
_SHOWN_CHARS, _SHOWN_STDOUT_CHARS = 1_000, 300
_READ_BYTES = 65_536
_LAST_READS = 32  # a pipe holds 1 MiB at most
_MARK = "ROLLOUT_COMMAND"  # environment variable by which children are found
_SWEEPS, _SWEEP_INTERVAL_S = 50, 0.01
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # by which /proc counts


@dataclass(frozen=True)
class CommandResult:
    """A command that has ended. `stdout` and `stderr` are what it wrote last."""

    name: str
    exit_code: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    truncated: bool  # it wrote more to stdout than `stdout` holds

    @property
    def failure(self) -> str | None:
        """Return None if the command exited with 0, else what happened, with the end of its output."""
        if not self.exit_code:
            return None
        shown = self.stderr.strip()[-_SHOWN_CHARS:] or "it wrote nothing to stderr"
        if end := self.stdout.strip()[-_SHOWN_STDOUT_CHARS:]:  # some command-line agents report errors there
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
    """Run a command to its end, and return what it wrote to stdout.

    Its environment is this process's, with `context.environ()` and `env` added; `keep_home` is that of `environ`.
    `input` is its stdin. Its stderr is written to the session's log. When it ends, its children are killed.

    Raises:
        CommandError: its exit code is not 0, or it wrote more than 16 MiB to stdout.
        CommandNotStarted: it cannot be started.
    """
    environ = {**context.environ(keep_home=keep_home), **(env or {})}
    result = await run_to_end(command, env=environ, input=input, cwd=cwd)
    if result.failure is not None:
        raise CommandError(result.failure)
    if result.truncated:
        raise CommandError(
            f"{result.name} wrote more than {_KEPT_BYTES} bytes to stdout: let it write a file instead"
        )
    return result.stdout


async def run_to_end(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    input: str = "",
    cwd: Path | str | None = None,
    log_stdout: bool = False,
) -> CommandResult:
    """Run a command to its end. Its environment is this process's, with `env` added.

    Raises:
        CommandNotStarted: it cannot be started.
    """
    mark, began_at = uuid.uuid4().hex, time.clock_gettime(_BOOT_CLOCK)
    inherited = {name: value for name, value in os.environ.items() if name != PAYLOAD_VARIABLE}
    with (
        TemporaryFile() as stdin,
        _Output(_KEPT_BYTES, sys.stdout if log_stdout else None) as stdout,
        _Output(_SHOWN_BYTES, sys.stderr) as stderr,
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
                env={**inherited, **env, _MARK: mark},
                start_new_session=True,
            )
            await process.wait()
        except OSError as error:
            raise CommandNotStarted(f"the command {command[0]!r} cannot be started: {error}") from error
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            await _kill_marked(mark, began_at)  # also what was started by a call that was cancelled meanwhile
    assert process.returncode is not None
    return CommandResult(command[0], process.returncode, stdout.text(), stderr.text(), stdout.truncated)


class _Output:
    """A pipe whose output is logged as it arrives. Its end is kept.

    The pipe is read without blocking and is not waited for: a child that keeps it open delays nothing.
    """

    def __init__(self, kept_bytes: int, log: TextIO | None) -> None:
        self._kept_bytes = kept_bytes
        self._log = log
        self._log_budget = _LOGGED_BYTES
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = bytearray()
        self.truncated = False
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def __enter__(self) -> _Output:
        asyncio.get_running_loop().add_reader(self._read_end, self._read)
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(_LAST_READS):  # what the command wrote before it ended is in the pipe
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self.write_end)
        if self._log is not None:
            self._log.flush()

    def text(self) -> str:
        return bytes(self._kept[-self._kept_bytes :]).decode(errors="replace")

    def _read(self) -> bool:
        """Read once. Return False if nothing is there."""
        try:
            data = os.read(self._read_end, _READ_BYTES)
        except BlockingIOError:
            return False
        self._kept += data
        if len(self._kept) > 2 * self._kept_bytes:
            del self._kept[: -self._kept_bytes]
            self.truncated = True
        self.truncated = self.truncated or len(self._kept) > self._kept_bytes
        if self._log is not None and self._log_budget > 0:
            self._log.write(self._decoder.decode(data))
            self._log_budget -= len(data)
            if self._log_budget <= 0:
                self._log.write(f"\n[the command wrote more than {_LOGGED_BYTES} bytes; the rest is not logged]\n")
        return True


async def _kill_marked(mark: str, began_at: float) -> None:
    """Kill the children that have left the process group, by the mark in their environment."""
    for _ in range(_SWEEPS):  # a child may fork meanwhile
        if not _sweep(f"{_MARK}={mark}".encode(), began_at):
            return
        await asyncio.sleep(_SWEEP_INTERVAL_S)


def _sweep(mark: bytes, began_at: float) -> bool:
    """Kill the processes with this mark, which started after `began_at`. Return whether there may be more."""
    found = False
    for process in Path("/proc").glob("[0-9]*"):  # empty if this is not Linux
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes()
            if mark in environ.split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                found = True
            elif not environ and _is_in_exec(process, began_at):
                found = True
    return found


def _is_in_exec(process: Path, began_at: float) -> bool:
    """Return whether a process without an environment is new and may get one soon: it is no zombie."""
    state, *fields = (process / "stat").read_text().rpartition(")")[2].split()
    return state not in "ZX" and int(fields[18]) >= int(began_at * os.sysconf("SC_CLK_TCK"))
