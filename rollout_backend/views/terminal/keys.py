"""Read single keys from the terminal while a run is shown.

Invariants:

- Unless the standard input is a terminal and the process is in its foreground, nothing is read or changed.
- The terminal's mode is restored when reading ends, and by `restore_terminals` before an exit without clean-up.
"""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable
from typing import Any, TextIO

# Original modes of the terminals being read, by file descriptor.
_saved: dict[int, list[Any]] = {}


def restore_terminals() -> None:
    """Restore the mode of every terminal."""
    for fd in [*_saved]:
        _restore(fd)


class Keys:
    """Calls `on_key` in the event loop with each key pressed between `start` and `stop`."""

    def __init__(self, on_key: Callable[[str], None], stream: TextIO | None = None) -> None:
        """`stream` defaults to the standard input."""
        self.reading = False
        self._on_key = on_key
        self._stream = stream
        self._fd = -1

    def start(self) -> None:
        """Start reading keys, if there is a terminal."""
        stream = self._stream or sys.stdin
        try:
            if not stream.isatty() or not _in_foreground(stream.fileno()):
                return
            self._fd = stream.fileno()
            _saved[self._fd] = termios.tcgetattr(self._fd)
            # Ctrl-C still interrupts in this mode.
            tty.setcbreak(self._fd, termios.TCSANOW)
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        except (AttributeError, ValueError, OSError, termios.error):
            # There is no input, or it is closed.
            _restore(self._fd)
            return
        self.reading = True

    def stop(self) -> None:
        """Stop reading, and restore the terminal's mode."""
        if self.reading:
            self.reading = False
            asyncio.get_running_loop().remove_reader(self._fd)
            _restore(self._fd)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 64) if _in_foreground(self._fd) else b""
        except OSError:
            data = b""
        if not data:
            self.stop()
        for key in data.decode(errors="ignore"):
            self._on_key(key)


def _in_foreground(fd: int) -> bool:
    """Return whether this process may use the terminal. The kernel stops background processes that use it."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        # This is not the process's controlling terminal, or there is no job control.
        return True


def _restore(fd: int) -> None:
    mode = _saved.pop(fd, None)
    if mode is not None and _in_foreground(fd):
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, mode)
