"""Seed each session's random numbers.

A runtime may restore sessions from a snapshot of a process that has already imported the agent. Without a new seed,
all of them would draw the same numbers. The snapshot may include the kernel's generator, so the seed also contains
the session's id.
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
