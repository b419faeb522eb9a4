"""How the CPU's SGLang servers are run: verl's own settings of the rollout where it has them, ours for the rest.

Ours stand under `actor_rollout_ref.rollout.engine_kwargs.sglang_cpu`, where verl keeps what is an engine's own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import ConfigError
from rollout_backend.local.verl_cpu.environment import ROLLOUT_NAME

_WHERE = f"actor_rollout_ref.rollout.engine_kwargs.{ROLLOUT_NAME}"


def memory_folder() -> Path:
    """Of files that are read once and deleted."""
    shared_memory = Path("/dev/shm")  # noqa: S108
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


class ServerSettings(BaseModel):
    """`engine_kwargs.sglang_cpu`; every one has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(default=1, ge=1)
    """Of a server. One is fastest for a small model, whose attention is many tiny operations: waking a second thread
    for each costs more than it adds."""
    max_running_requests: int = Field(default=64, ge=1)
    """At once, of a server; further ones wait in it."""
    python: Path | None = None
    """Interpreter of the environment that SGLang lives in. Default: the one that `rollout engine install` made."""
    log_dir: Path = Path("runs/sglang_cpu")
    """Where the servers' logs go."""
    weights_dir: Path = Field(default_factory=memory_folder)
    """Where weights lie on their way from the trainer to a server: in memory, where the machine allows."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """From a server's start until it answers."""

    @classmethod
    def of(cls, rollout: Any) -> Self:
        """Takes verl's `RolloutConfig`.

        Raises:
            ConfigError: names the key at fault.
        """
        given: Mapping[str, Any] = (rollout.engine_kwargs or {}).get(ROLLOUT_NAME) or {}
        try:
            return cls.model_validate({str(key): value for key, value in given.items()})
        except ValidationError as error:
            raise ConfigError(
                "\n".join(f"{_WHERE}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            ) from None

    def serving(self, dtype: str) -> ServingConfig:
        return ServingConfig.model_validate(
            {
                "device": "cpu",
                "dtype": dtype,
                "threads": self.threads,
                "max_running_requests": self.max_running_requests,
                "python": self.python,
                "startup_timeout_s": self.startup_timeout_s,
            }
        )


def model_of(rollout: Any, model: Any) -> ModelConfig:
    """The model that verl's `RolloutConfig` and `HFModelConfig` speak of."""
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    # SGLang wants one token of room beyond prompt and response.
    return ModelConfig(path=Path(model.path).absolute(), context_length=max(length + 1, 16))
