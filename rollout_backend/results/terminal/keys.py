"""Reads single keys from a terminal while a run is shown.

Invariants:

- Without a terminal as the standard input, or in the background, nothing is read and nothing is changed.
- The terminal gets its mode back when the reading ends, and by `restore_terminals` before an exit without clean-up.
"""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable
from typing import Any, TextIO

_saved: dict[int, list[Any]] = {}  # the modes of terminals whose keys are read, by file descriptor


def restore_terminals() -> None:
    """Give every terminal its mode back."""
    for fd in [*_saved]:
        _restore(fd)


class Keys:
    """Calls `on_key` with each key that is pressed between `start` and `stop`, in the event loop."""

    def __init__(self, on_key: Callable[[str], None], stream: TextIO | None = None) -> None:
        """`stream` defaults to the standard input."""
        self.reading = False
        self._on_key = on_key
        self._stream = stream
        self._fd = -1

    def start(self) -> None:
        """Begin to read keys, if there is a terminal."""
        stream = self._stream or sys.stdin
        try:
            if not stream.isatty() or not _in_foreground(stream.fileno()):
                return
            self._fd = stream.fileno()
            _saved[self._fd] = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSANOW)  # Ctrl-C remains an interrupt
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        except (AttributeError, ValueError, OSError, termios.error):  # no input, or a closed one
            _restore(self._fd)
            return
        self.reading = True

    def stop(self) -> None:
        """Stop reading, and give the terminal its mode back."""
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
    """Return whether this process may use the terminal: the kernel stops a background process that does."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not the terminal that controls this process, which has no job control
        return True


def _restore(fd: int) -> None:
    mode = _saved.pop(fd, None)
    if mode is not None and _in_foreground(fd):
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(fd, termios.TCSANOW, mode)
