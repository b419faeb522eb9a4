"""Run one session's command, and finally end it with all its descendants: `supervisor.py < ORDER`.

It runs as a program, by path, so it imports only the standard library.

    stdin:  one JSON object, see `Order`
    stdout: {"started": true} or {"error": TEXT, "errno": NUMBER}, then a `ProcessEnd`

Invariants:

- It outlives the process that started it, unless its order says otherwise. A session ends when its command exits,
  when a byte arrives in its pipe, or at its maximum lifetime.
- At the end, it has killed every process of the session that it may kill, on Linux including processes that left the
  process group.
- A log that exceeds twice `LOG_BYTES` is cut to its first `LOG_BYTES` and its end, because an agent may print without
  end.
- The pipe has a reader while the session is open, so any process can check whether the session is open.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_POLL_S = 0.02
_MEMORY_POLL_S, _LOG_POLL_S = 0.5, 2.0
# poll(2) takes a 32-bit number of milliseconds.
_LONGEST_POLL_S = 86_400.0


LOG_BYTES = 32 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
Why = Literal["ended", "stopped", "lifetime", "memory"]


class Order(TypedDict):
    """The command to run, and its limits."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    pipe: str
    """Path of the pipe that stops the session."""
    scratch: str
    """The session's folder, which is removed at the end."""
    memory_bytes: int | None
    """Memory limit of all processes together; they are killed above it."""
    nice: int
    grace_s: float
    """Seconds from SIGTERM to SIGKILL."""
    lifetime_s: float
    ends_with_starter: bool
    """Whether the session is stopped when its starter closes the pipe of this program's output, or dies."""


class ProcessEnd(TypedDict):
    """The end of a session."""

    code: int
    """Exit code; a negative value is the number of a signal."""
    why: Why


def main() -> None:
    order: Order = json.loads(sys.stdin.buffer.read())
    # The starter waits for this exit. Ray kills a worker's children, so the session must be no child.
    if os.fork():
        os._exit(0)
    os.setsid()
    try:
        end: Mapping[str, Any] = _supervise(order)
    except (OSError, subprocess.SubprocessError) as error:
        end = {"error": str(error), "errno": getattr(error, "errno", None) or 0}
    with contextlib.suppress(OSError):
        Path(order["pipe"]).unlink()
    shutil.rmtree(order["scratch"], ignore_errors=True)
    _say(end)


def _supervise(order: Order) -> ProcessEnd:
    """Run the session to its end. Raises OSError or SubprocessError if the command cannot start."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, because the agent would inherit it.
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Open for both, so that it never reaches end of file, and writers find a reader while this process lives.
    stop = os.open(order["pipe"], os.O_RDWR | os.O_NONBLOCK)
    agent = _start(order)
    _say({"started": True})
    events = select.poll()
    events.register(awake, select.POLLIN)
    events.register(stop, select.POLLIN)
    if order["ends_with_starter"]:
        # poll always reports the error of a pipe without a reader, so no mask is needed.
        events.register(1, 0)
    until = time.monotonic() + order["lifetime_s"]
    why = _wait(agent, events, awake, until, order["memory_bytes"], Path(order["log"]))
    if why in ("stopped", "lifetime"):
        _signal(agent, signal.SIGTERM)
        ended = select.poll()
        ended.register(awake, select.POLLIN)
        _wait(agent, ended, awake, time.monotonic() + order["grace_s"])
    _kill_all(agent)
    return ProcessEnd(code=agent.returncode, why=why)


def _start(order: Order) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(order["nice"])

    with Path(order["log"]).open("ab") as log:
        return subprocess.Popen(
            order["argv"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=order["cwd"],
            env=order["env"],
            start_new_session=True,
            preexec_fn=prepare,
        )


def _wait(
    agent: subprocess.Popen[bytes],
    events: select.poll,
    awake: int,
    until: float,
    memory_bytes: int | None = None,
    log: Path | None = None,
) -> Why:
    """Wait until the agent ends, the session is stopped, or it exceeds its time or memory limit. Return which."""
    while agent.poll() is None:
        left = until - time.monotonic()
        if left <= 0:
            return "lifetime"
        if memory_bytes is not None:
            if _resident_bytes() > memory_bytes:
                return "memory"
            left = min(left, _MEMORY_POLL_S)
        if log is not None:
            with contextlib.suppress(OSError):
                # The log may have been deleted, or the disk may be full.
                _shorten(log)
            left = min(left, _LOG_POLL_S)
        ready = {descriptor for descriptor, _ in events.poll(min(left, _LONGEST_POLL_S) * 1000)}
        if ready - {awake}:
            return "stopped"
        if ready:
            os.read(awake, 4096)
            _reap_orphans(agent)
    return "ended"


def _shorten(log: Path) -> None:
    if log.stat().st_size > 2 * LOG_BYTES:
        with log.open("rb") as file:
            file.seek(-_TAIL_BYTES, os.SEEK_END)
            end = file.read(_TAIL_BYTES)
        # The agent's own descriptor appends.
        os.truncate(log, LOG_BYTES)
        with log.open("ab") as file:
            file.write(b"\n[the log was too long: a part is missing]\n" + end)


def _resident_bytes() -> int:
    """Return the resident memory of all processes in the session."""
    total, todo = 0, _children(os.getpid())
    while todo:
        pid = todo.pop()
        todo += _children(pid)
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def _reap_orphans(agent: subprocess.Popen[bytes]) -> None:
    """Collect the exit codes of orphaned descendants."""
    if sys.platform != "linux":
        return
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid != agent.pid:
            os.waitpid(ended.si_pid, 0)


def _kill_all(agent: subprocess.Popen[bytes]) -> None:
    """Kill every process of the session. Orphans become children of this process, which then kills them too."""
    _signal(agent, signal.SIGKILL)
    agent.wait()
    while sum(map(_kill, _children(os.getpid()))):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_KILL_POLL_S)


def _kill(pid: int) -> bool:
    """Kill a process. Return False for another user's, as `sudo` starts them, which remains."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def _signal(agent: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # macOS refuses to signal a zombie's group.
        os.killpg(agent.pid, number)


def _children(pid: int) -> list[int]:
    """Return the children of a process (Linux only)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _say(message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
