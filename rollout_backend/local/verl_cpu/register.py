"""Enters the CPU platform and the CPU rollout into verl's registries. Imported by verl itself, in every process.

verl imports what VERL_USE_EXTERNAL_MODULES names at the end of its own `__init__`, before anything asks for a
platform or a rollout. The replica and the adapter are imported when they are wanted: most processes need neither.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rollout_backend.local.verl_cpu import cpu_platform  # noqa: F401  # enters itself, as verl's own do
from rollout_backend.local.verl_cpu.environment import ROLLOUT_NAME


def _replica() -> Any:
    from rollout_backend.local.verl_cpu.replica import SGLangCpuReplica

    return SGLangCpuReplica


RolloutReplicaRegistry.register(ROLLOUT_NAME, _replica)
# A private name, and the only one: verl registers its own adapters by editing this dict.
_ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "rollout_backend.local.verl_cpu.adapter.DiskAdapter"
