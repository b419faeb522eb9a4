"""Processes of an agent: their home directories, exit codes and ends."""

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MARK = "ROLLOUT_COMMAND"
"""Environment variable that identifies the children of a command."""
KILLED_S = 10.0
"""Seconds within which a process ends after SIGKILL, unless the kernel holds it."""
_SWEEPS, _SWEEP_INTERVAL_S = 50, 0.01
_IN_HOME = {
    "XDG_CONFIG_HOME": ".config",
    "XDG_CACHE_HOME": ".cache",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}


def home_variables(folder: Path) -> dict[str, str]:
    """Return environment variables for a home in this folder, and create the folders that they name.

    Programs keep settings there, including the model's endpoint and key, which belong to a single rollout.
    """
    home = folder / "home"
    named = {"HOME": home, "TMPDIR": folder / "tmp", "XDG_RUNTIME_DIR": folder / "run"}
    named |= {name: home / path for name, path in _IN_HOME.items()}
    for path in named.values():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {name: str(path) for name, path in named.items()}


def describe_exit(exit_code: int) -> str:
    """Return `exited with code 3` or `was killed by SIGSEGV`. Real-time signals have no names."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def boot_clock() -> float:
    """Return the time by the clock of start times in /proc."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def new_mark() -> str:
    """Return a value of `MARK`. It extends this process's own value, so that its owner also finds grandchildren."""
    return os.environ.get(MARK, "") + uuid.uuid4().hex


def kill_group(group: int) -> None:
    """Kill a process group. It may have ended, or may contain only another user's processes, started with `sudo`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def wait_killed(process: Any, what: str) -> None:
    """Wait for the end of a process of asyncio that was killed. One that a driver holds may never end: it is logged
    and left."""
    try:
        async with asyncio.timeout(KILLED_S):
            await process.wait()
    except TimeoutError:
        text = "%s, process %d, has not ended %g s after SIGKILL, as if a driver held it: it is left, with its memory"
        log.warning(text, what, process.pid, KILLED_S)


def end_marked(mark: str, began_at: float) -> None:
    """Kill the processes with this mark, until none is left: one may fork in the meantime."""
    for _ in range(_SWEEPS):
        if not _kill_marked(mark, began_at):
            break
        time.sleep(_SWEEP_INTERVAL_S)


def _kill_marked(mark: str, began_at: float) -> bool:
    """Kill the other processes whose environment has this `MARK`, also those that have left their process group.

    Return whether there may be more: a process that started after `began_at` may fork in the meantime.
    """
    wanted, found = f"{MARK}={mark}".encode(), False
    # The glob finds nothing except on Linux.
    for process in {*Path("/proc").glob("[0-9]*")} - {Path(f"/proc/{os.getpid()}")}:
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes()
            if any(each.startswith(wanted) for each in environ.split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)
                found = True
            elif not environ and _is_in_exec(process, began_at):
                found = True
    return found


def _is_in_exec(process: Path, began_at: float) -> bool:
    """Return whether a process without an environment is new and may soon get one, so it is not a zombie."""
    state, *fields = (process / "stat").read_text().rpartition(")")[2].split()
    return state not in "ZX" and int(fields[18]) >= int(began_at * os.sysconf("SC_CLK_TCK"))
