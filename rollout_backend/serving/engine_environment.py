"""The interpreter and the environment of an engine's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rollout_backend.config import ServingConfig
from rollout_backend.serving.install import find_engine

Command = tuple[list[str], dict[str, str]]
"""The arguments and the complete environment of a process."""

# Variables of this process that break one in another Python environment, outside Ray.
_NOT_INHERITED = ("PYTHON", "RAY_", "VIRTUAL_ENV", "ROLLOUT__")


def interpreter(serving: ServingConfig) -> Path:
    """Return the Python interpreter of the engines. Raise ConfigError if it is the CPU engine's and not installed."""
    if serving.python is not None:
        return serving.python
    return find_engine(engine=serving.engine) if serving.device == "cpu" else Path(sys.executable)


def base_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of an engine. `inherited` is what to start from, by default this process's."""
    env = {
        name: value
        for name, value in (os.environ if inherited is None else inherited).items()
        if not name.startswith(_NOT_INHERITED)
    }
    # Otherwise modules are imported from the working directory first.
    env["PYTHONSAFEPATH"] = "1"
    env["PYTHONUNBUFFERED"] = "1"  # otherwise the log lacks the last lines of a server that dies
    # A model is a folder; without these an engine looks up a mistyped path on a model hub.
    return env | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def cpu_threads(threads: int) -> dict[str, str]:
    """Return the variables that limit a server on the CPU to its threads; else each server takes every core."""
    # Agents run on the same cores: threads that spin as they wait would slow them down.
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
