"""The kinds of engines.

To add a kind, implement `engine.EngineKind` in a module here, list it below, and add its name to `serving.kind` in
`rollout_backend/config/serving.py`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from rollout_backend.config import RolloutConfig
from rollout_backend.serving.engine import EngineKind

ENGINE_KINDS = {  # `serving.kind` -> the class, in a module that is imported when it is used: Ray is slow to import
    "process": "rollout_backend.serving.local_engine:LocalEngines",
    "ray": "rollout_backend.serving.ray_engine:RayEngines",
    "external": "rollout_backend.serving.external_engine:ExternalEngines",
}


def engine_kind(config: RolloutConfig, log_dir: Path) -> EngineKind:
    """Return what makes the engines of `serving.kind`."""
    module, _, name = ENGINE_KINDS[config.serving.kind].partition(":")
    kind: type[EngineKind] = getattr(importlib.import_module(module), name)
    return kind(config, log_dir)
