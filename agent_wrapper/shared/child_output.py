"""Read the output of child processes in limited memory.

Invariant: nothing waits for the end of a pipe without a limit, since a child's child may keep it open.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO

LOGGED_BYTES = 16 * 1024 * 1024
# A pipe holds at most 1 MiB.
_READ_BYTES, _LAST_READS = 65_536, 32
# An exit is noticed this late while a child's child keeps the output open.
_POLL_S = 0.25


class ChildOutput:
    """A pipe for the output of child processes. Memory holds its end, at least `kept_bytes`; `log` gets the first
    `LOGGED_BYTES` as they arrive."""

    def __init__(self, kept_bytes: int, log: Callable[[bytes], object] | None = None) -> None:
        self._kept_bytes, self._log, self._log_budget = kept_bytes, log, LOGGED_BYTES
        self._kept = bytearray()
        self.truncated = False
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.read_end, self.write_end = FileIO(read_end), FileIO(write_end, "w")

    def close(self) -> None:
        self.text()
        self.read_end.close()
        self.write_end.close()

    def read(self) -> bool:
        """Read once, without waiting. Return whether there was any output."""
        data = b"" if self.read_end.closed else self.read_end.read(_READ_BYTES) or b""
        self._kept += data
        self.truncated = self.truncated or len(self._kept) > self._kept_bytes
        if len(self._kept) > 2 * self._kept_bytes:
            del self._kept[: -self._kept_bytes]
        if self._log is not None and data and self._log_budget > 0:
            self._log(data[: self._log_budget])
            self._log_budget -= len(data)
            if self._log_budget <= 0:
                self._log(b"\n[the command wrote more than %d bytes; the rest is not logged]\n" % LOGGED_BYTES)
        return bool(data)

    def text(self) -> str:
        """Read the rest, and return the end of the output, at most `kept_bytes`."""
        for _ in range(_LAST_READS):
            if not self.read():
                break
        return self._kept[-self._kept_bytes :].decode(errors="replace")


def wait(
    process: subprocess.Popen[bytes], outputs: Sequence[ChildOutput], timeout_s: float | None, grace_s: float = 0.0
) -> int:
    """Return the exit code of a process. Its outputs are read until they end, or until `grace_s` after its exit.

    Raises:
        subprocess.TimeoutExpired: it has not ended.
    """
    deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
    with selectors.DefaultSelector() as selector:
        for each in outputs:
            each.write_end.close()
            selector.register(each.read_end, selectors.EVENT_READ, each.read)
        while selector.get_map() and (now := time.monotonic()) < deadline:
            for key, _ in selector.select(min(_POLL_S, deadline - now)):
                if not key.data():
                    selector.unregister(key.fileobj)
            if process.returncode is None and process.poll() is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(None if timeout_s is None else max(0.0, deadline - time.monotonic()))
    raise subprocess.TimeoutExpired(process.args, timeout_s or 0.0)
