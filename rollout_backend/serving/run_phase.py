"""The phases of a run."""

from __future__ import annotations

from enum import StrEnum


class RunPhase(StrEnum):
    """The phases of a run, in order. A run that cannot start skips to the last one."""

    CHECK = "check"  # of this machine, bucket, runtime and queue
    ENGINES = "engines"  # the start of the engines and their router
    GATEWAY = "gateway"
    ROLLOUTS = "rollouts"
    STOP = "stop"
