"""Find the implementation of `serving.kind`.

To add a kind, see `rollout_backend.config.serving`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ImportString, TypeAdapter

from rollout_backend.config import ENGINE_KINDS, RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.serving.engine import EngineFactory


def engine_factory(config: RolloutConfig, log_dir: Path) -> EngineFactory:
    """Make the factory that `serving.kind` names.

    Raises:
        ConfigError: the import path names no subclass of EngineFactory.
    """
    kind = config.serving.kind
    found = TypeAdapter(ImportString[Any]).validate_python(ENGINE_KINDS.get(kind, kind))
    if not (isinstance(found, type) and issubclass(found, EngineFactory)):
        raise ConfigError(f"serving.kind: {kind!r} is not a subclass of EngineFactory")
    return found(config, log_dir)
