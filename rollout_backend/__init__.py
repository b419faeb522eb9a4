"""Run LLM agents in their own containers and collect their rollouts for a trainer.

    from rollout_backend import RolloutManager, load_config, read_tasks

    async with RolloutManager(load_config("config.yaml")) as manager:
        step = await manager.collect(read_tasks("tasks.jsonl"))

`__all__` is the public API. Each name is imported when it is first used, so `import rollout_backend` is quick and
loads no cloud client, no Ray and no torch.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from agent_wrapper.contract import Outcome as Outcome
    from agent_wrapper.contract import Rollout as Rollout
    from agent_wrapper.contract import Sampling as Sampling
    from agent_wrapper.contract import Segment as Segment
    from agent_wrapper.contract import Turn as Turn
    from rollout_backend.config import RolloutConfig as RolloutConfig
    from rollout_backend.config import load_config as load_config
    from rollout_backend.core.tasks import Task as Task
    from rollout_backend.core.tasks import read_tasks as read_tasks
    from rollout_backend.errors import CircuitOpen as CircuitOpen
    from rollout_backend.errors import CloudLost as CloudLost
    from rollout_backend.errors import ConfigError as ConfigError
    from rollout_backend.errors import CredentialsExpired as CredentialsExpired
    from rollout_backend.errors import LedgerError as LedgerError
    from rollout_backend.errors import ManifestError as ManifestError
    from rollout_backend.errors import PreflightError as PreflightError
    from rollout_backend.errors import RolloutBackendError as RolloutBackendError
    from rollout_backend.errors import RunHeld as RunHeld
    from rollout_backend.errors import ServingError as ServingError
    from rollout_backend.errors import StartupError as StartupError
    from rollout_backend.errors import StoreError as StoreError
    from rollout_backend.errors import TaskFileError as TaskFileError
    from rollout_backend.errors import WeightsMismatch as WeightsMismatch
    from rollout_backend.errors import WeightUpdateFailed as WeightUpdateFailed
    from rollout_backend.manager import RolloutManager as RolloutManager
    from rollout_backend.model.serving.adapters import AdapterUpdate as AdapterUpdate
    from rollout_backend.model.serving.weights import WeightUpdate as WeightUpdate
    from rollout_backend.run.accounts.progress import Progress as Progress
    from rollout_backend.run.accounts.step_report import GroupResult as GroupResult
    from rollout_backend.run.accounts.step_report import StepReport as StepReport
    from rollout_backend.run.accounts.step_report import StepResult as StepResult

_MODULES = {
    "rollout_backend.manager": ("RolloutManager",),
    "rollout_backend.run.accounts.progress": ("Progress",),
    "rollout_backend.model.serving.adapters": ("AdapterUpdate",),
    "rollout_backend.model.serving.weights": ("WeightUpdate",),
    "rollout_backend.config": ("RolloutConfig", "load_config"),
    "rollout_backend.core.tasks": ("Task", "read_tasks"),
    "rollout_backend.run.accounts.step_report": ("StepResult", "StepReport", "GroupResult"),
    "agent_wrapper.contract": ("Rollout", "Outcome", "Segment", "Turn", "Sampling"),
    "rollout_backend.errors": (
        "RolloutBackendError",
        "ConfigError",
        "TaskFileError",
        "PreflightError",
        "ServingError",
        "StartupError",
        "RunHeld",
        "CloudLost",
        "StoreError",
        "CredentialsExpired",
        "CircuitOpen",
        "ManifestError",
        "LedgerError",
        "WeightsMismatch",
        "WeightUpdateFailed",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("rollout-backend")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
