"""Prepare a container's main process for the processes that agents start, and reap orphans.

Invariants:

- a forked child starts with the default handlers of SIGINT and SIGTERM and without a wakeup descriptor. With the
  server's handlers, `terminate()` would not end it, and its signals would reach the parent's event loop;
- the exit status of a child can be waited for;
- as PID 1, this process reaps the orphans that become its children, and never a child that it started itself.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("agent_wrapper")

_SERVER_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REAP_INTERVAL_S = 1.0


def prepare_process() -> None:
    """Open missing standard streams, let children be waited for, and give forked children default handlers."""
    _open_standard_streams()
    # While SIGCHLD is ignored, the kernel reaps children itself, and every exit code is lost.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _reset_signals_in_children()


def _open_standard_streams() -> None:
    """Open the null device for the descriptors 0 to 2 that are closed. Otherwise other files and sockets get these
    numbers, and children write their output there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)
            if opened != descriptor:
                os.close(opened)
            os.set_inheritable(descriptor, True)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


@functools.cache
def _reset_signals_in_children() -> None:
    masks = threading.local()

    # A signal that arrives before the handlers are reset waits, and then meets the default handler.
    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SERVER_SIGNALS)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def reset() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=reset)


class OrphanReaper:
    """Reaps orphans, which the kernel gives to PID 1 when their parent ends.

    An orphan becomes a child of the main thread. A process that was started here is a child of the thread that forked
    it, until that thread ends. A zombie of the main thread is therefore an orphan unless it was seen below another
    thread, was there before, was forked by `os.fork`, or is the process of an object that can still wait for it.
    """

    def __init__(self) -> None:
        self._own: set[int] = set(_children(os.getpid()))
        self._zombies: set[int] = set()
        os.register_at_fork(after_in_parent=self._on_fork)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_REAP_INTERVAL_S)
            try:
                self.reap()
            except Exception:
                # A process may end while it is inspected.
                logger.warning("orphans could not be reaped; this is repeated", exc_info=True)

    def reap(self) -> None:
        """Reap the orphans that were zombies at the last call, too, so that other code has time to wait for them."""
        # Other threads may fork in the meantime: `_own` is changed in place.
        self._own.difference_update({pid for pid in [*self._own] if not Path(f"/proc/{pid}").exists()})
        main = os.getpid()
        candidates = set(_children(main))
        threads = (int(task.name) for task in Path("/proc/self/task").iterdir())
        self._own.update(pid for thread in threads if thread != main for pid in _children(thread))
        zombies = {pid for pid in candidates - self._own if _is_zombie(pid)}
        due = zombies & self._zombies
        if due:
            self._own |= due & _awaited()
        for pid in due - self._own:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._zombies = zombies

    def _on_fork(self) -> None:
        self._own.update(_children(threading.get_native_id()))


def _children(thread: int) -> list[int]:
    """Return the processes whose parent is this thread; none if the kernel does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()]
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def _awaited() -> set[int]:
    """Return the processes of all objects of `subprocess` and `multiprocessing`."""
    forking = sys.modules.get("multiprocessing.popen_fork")
    kinds = (subprocess.Popen, *([forking.Popen] if forking is not None else []))
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return {pid for pid in (getattr(each, "pid", None) for each in found) if isinstance(pid, int)}
