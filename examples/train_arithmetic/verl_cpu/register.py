"""Add the CPU platform and the CPU rollout to verl's registries. verl imports this module in every process.

verl imports the modules in VERL_USE_EXTERNAL_MODULES at the end of its `__init__`, before any code looks up a
platform or a rollout. Replica and adapter are imported on first use, because most processes need neither.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_cpu import cpu_platform  # noqa: F401  # registers itself, like verl's platforms
from verl_cpu.environment import ROLLOUT_NAME


def _replica() -> Any:
    from verl_cpu.replica import SGLangCpuReplica

    return SGLangCpuReplica


RolloutReplicaRegistry.register(ROLLOUT_NAME, _replica)
# The only private name: verl registers its own adapters by editing this dict.
_ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "verl_cpu.adapter.DiskAdapter"
