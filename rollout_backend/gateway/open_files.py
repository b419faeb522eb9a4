"""How many open files a gateway needs."""

from __future__ import annotations

import resource

from rollout_backend.errors import ConfigError
from rollout_backend.gateway.journal import OPEN_FILES

_FILES_OF_A_CALL = 3  # a connection of the agent, one to the engine, and one that an agent keeps open when idle
OTHER_FILES = 256 + OPEN_FILES


def needed_files(calls: int) -> int:
    """Return how many open files a gateway with this many concurrent calls needs."""
    return calls * _FILES_OF_A_CALL + OTHER_FILES


def allow_files(calls: int) -> None:
    """Raise this process's limit of open files to what this many concurrent calls need. A shell's default is 1024.

    Raises:
        ConfigError: the hard limit is lower.
    """
    needed = needed_files(calls)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"gateway.max_concurrent_calls={calls} takes {needed} open files, and this machine allows a process "
            f"{hard}: raise that (`ulimit -Hn`), or lower the setting and raise gateway.processes"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
