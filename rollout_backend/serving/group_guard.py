"""Ends what is left of a server's process group once the server has ended: `python group_guard.py PID`.

An engine has processes of its own, and those it has just made when it dies have not yet asked the kernel to end with
it: a trainer that is killed while its engines start would leave them behind. This waits for the engine, outside its
group and as nobody's child, so that it needs nobody to live.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys


def main() -> None:
    group, leader = int(sys.argv[1]), None
    try:
        leader = os.pidfd_open(group)
    except ProcessLookupError:
        pass  # it has ended already
    except (AttributeError, OSError):
        return  # this system has no way to wait for a process that is no child
    if os.fork():  # whoever started us waits for this
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if leader is not None:
        select.select([leader], [], [])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
