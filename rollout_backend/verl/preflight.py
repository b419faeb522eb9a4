"""verl makes its engines before it makes our manager; this is what can be known to fail before that.

`PayloadDataset` calls it, since the dataset is the first thing of ours that verl makes.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_backend import preflight
from rollout_backend.errors import ConfigError
from rollout_backend.verl.settings import settings_of

MANAGER = "rollout_backend.verl.CloudAgentLoopManager"
_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_NO_SERVER_YET = ("127.0.0.1:1",)


def check(section: Any) -> None:
    """Checks the run that a section of verl's settings belongs to, unless it is not to go through this backend.

    Raises:
        ConfigError, PreflightError: what to change.
    """
    root = section._get_root() if hasattr(section, "_get_root") else None
    if root is None or "actor_rollout_ref" not in root:
        return
    rollout = root.actor_rollout_ref.rollout
    name = (rollout.get("agent") or {}).get("agent_loop_manager_class")
    if not name and "rollout_backend" not in (rollout.get("custom") or {}):
        return
    check_version()
    _check_class(name)
    config = settings_of(root, _NO_SERVER_YET)
    with ThreadPoolExecutor(1) as thread:  # whatever loop the caller's thread may be running
        thread.submit(asyncio.run, preflight.check(config)).result()


def check_version() -> None:
    """Raises ConfigError for a verl before 0.9: its trainer wants rows, and to be told of them, in another way."""
    version = importlib.metadata.version("verl")
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 9):
        raise ConfigError(f"verl {version} is too old for this backend: install verl 0.9.1")


def _check_class(name: str | None) -> None:
    if not name:
        raise ConfigError(f"the backend has its settings, but verl is not told to use it: add +{_KEY}={MANAGER}")
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute, None) if module else None
    except ImportError as error:
        raise ConfigError(f"{_KEY}={name} cannot be imported ({error}): set it to {MANAGER}") from None
    if found is None:
        raise ConfigError(f"{_KEY}={name}: there is no such class; set it to {MANAGER}")
