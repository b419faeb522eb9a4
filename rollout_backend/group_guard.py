"""Ends the process group of a server once it has ended, or its owner has: `python group_guard.py SERVER OWNER`.

The kernel tells a server to end when its owner dies. That is not all: an engine has processes of its own, and those
that it has just made when it dies have not asked the kernel yet to end with it; and a server may hang over its end.
This waits outside the group and as nobody's child, so that it needs nobody to live.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

_GRACE_S = 10.0  # for a server whose owner has died to end by itself


def main() -> None:
    group = int(sys.argv[1])
    try:
        server, owner = _watched(group), _watched(int(sys.argv[2]))
    except (AttributeError, OSError):
        return  # this system has no way to wait for a process that is no child
    if os.fork():  # whoever started us waits for this
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if server is not None and owner is not None:
        select.select([server, owner], [], [])
    if server is not None:  # where it has ended already, this waits for nothing
        select.select([server], [], [], _GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _watched(pid: int) -> int | None:
    """Something that can be read once the process has ended; None if it is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


if __name__ == "__main__":
    main()
