"""Run a command to its end, find out why a process ended, and find uv, which installs packages."""

import asyncio
import logging
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import BinaryIO

from agent_wrapper.shared.processes import wait_killed
from rollout_backend.base.disk import call_disk
from rollout_backend.errors import ConfigError

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 * 1024


async def run_child(
    argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
) -> CompletedProcess[bytes]:
    """Return the exit code and the output of a command, which gets no input. The command is killed if it does not end
    in time or the caller is cancelled.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(timeout_s):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await wait_killed(process, argv[0])
    assert process.returncode is not None
    return CompletedProcess(argv, process.returncode, out, errors)


async def open_log(path: Path) -> BinaryIO:
    """Open a file for the output of a child. If its disk does not answer, the output is lost.

    Raises:
        OSError: the file cannot be written.
    """

    opened: list[BinaryIO] = []
    is_awaited = True

    def open_file() -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        opened.append(file)
        if not is_awaited:
            file.close()
        return file

    try:
        return await call_disk(open_file)
    except BaseException as error:
        # The disk may open it later, or has opened it for a caller that was cancelled.
        is_awaited = False
        for file in opened:
            file.close()
        if not isinstance(error, TimeoutError):
            raise
        logger.warning("%s cannot be opened, because its disk does not answer: the output is lost", path)
        return _discarded()


def _discarded() -> BinaryIO:
    return Path(os.devnull).open("ab")


def find_uv() -> str:
    """Return the path of uv. Raises ConfigError if it is not installed."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
    if uv is None:
        raise ConfigError("uv, which installs packages, is not here: pip install uv, or install the extra local")
    return uv


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes of this machine the kernel has killed for lack of memory; 0 if unknown."""
    try:
        lines = counters.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration):
        return 0


def describe_sigkill(before: int, now: int) -> str:
    """Describe a process's end by SIGKILL by the number of `oom_kills` before its start, and now.

    Programs such as systemd-oomd kill for lack of memory as well, and the kernel does not count them.
    """
    if now > before:
        return "killed by SIGKILL, and since its start the kernel has killed a process for lack of memory"
    return "killed by SIGKILL, perhaps for lack of memory"


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, from its last 64 KiB at most; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
