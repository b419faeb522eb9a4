"""Give each session its own random numbers.

A runtime may restore sessions from a snapshot of a process that has already imported the agent. Without this, all
of them would draw the same numbers. The kernel's generator may be part of the snapshot too, so the session's id is
added.
"""

import hashlib
import os
import random
import sys


def reseed(session_id: str) -> None:
    """Seed `random` and, if it is imported, numpy's global generator from the session's id and the kernel."""
    seed = hashlib.sha256(session_id.encode() + os.urandom(16)).digest()
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(seed[:4], "little"))
