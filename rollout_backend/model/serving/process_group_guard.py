"""Kill a server's process group after the server or its owner ends: `process_group_guard.py SERVER OWNER`.

The kernel sends a server SIGTERM when its owner dies. That is not enough: a process that an engine has just started
has not yet asked the kernel to end with it, and a server may hang while it ends. The guard runs outside the group and
without a parent, so the end of another process does not affect it.
"""

import contextlib
import os
import select
import signal
import sys

# Time for a server to exit after its owner died.
_GRACE_S = 10.0


def main() -> None:
    group = int(sys.argv[1])
    try:
        server, owner = _watched(group), _watched(int(sys.argv[2]))
    except (AttributeError, OSError):
        # This system cannot wait for a process that is not a child.
        return
    # The starter waits for this process, so a child does the rest.
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if server is not None and owner is not None:
        select.select([server, owner], [], [])
    if server is not None:
        # `select` returns immediately if the server has ended.
        select.select([server], [], [], _GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _watched(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


if __name__ == "__main__":
    main()
