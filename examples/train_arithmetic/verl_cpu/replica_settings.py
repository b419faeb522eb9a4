"""How the CPU's SGLang servers run: verl's rollout settings where verl has them, these settings for the rest.

They are read from `actor_rollout_ref.rollout.engine_kwargs.sglang_cpu`; verl keeps engine-specific settings there.
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
from verl_cpu.environment import ROLLOUT_NAME

_WHERE = f"actor_rollout_ref.rollout.engine_kwargs.{ROLLOUT_NAME}"


def memory_folder() -> Path:
    """Return the folder for files that are read once and deleted."""
    shared_memory = Path("/dev/shm")  # noqa: S108
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


class ServerSettings(BaseModel):
    """`engine_kwargs.sglang_cpu`; every setting has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(default=1, ge=1)
    """Threads of a server. One is fastest for a small model, whose attention consists of many tiny operations: waking
    a second thread for each costs more than it saves."""
    max_running_requests: int = Field(default=64, ge=1)
    """Concurrent requests of a server; further requests wait in it."""
    python: Path | None = None
    """Interpreter of SGLang's environment. Default: the one that `rollout engine install` created."""
    log_dir: Path = Path("runs/sglang_cpu")
    """Folder of the servers' logs."""
    weights_dir: Path = Field(default_factory=memory_folder)
    """Folder of the weights between trainer and server: in memory, if the machine allows it."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """From a server's start until it answers."""

    @classmethod
    def of(cls, rollout: Any) -> Self:
        """Read the settings from verl's `RolloutConfig`.

        Raises:
            ConfigError: a setting is invalid; the message names its key.
        """
        given: Mapping[str, Any] = (rollout.engine_kwargs or {}).get(ROLLOUT_NAME) or {}
        try:
            return cls.model_validate({str(key): value for key, value in given.items()})
        except ValidationError as error:
            raise ConfigError(
                "\n".join(f"{_WHERE}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            ) from None

    def serving(
        self,
        dtype: str,
        skip_tokenizer_init: bool = True,
        model: Any = None,
        streams_once: bool = False,
        deterministic: bool = False,
    ) -> ServingConfig:
        """Return the serving settings. By default the server has no tokenizer, like verl's own servers.

        `model` is verl's `HFModelConfig`; a server of a model with an adapter takes it, like verl's own servers.
        `streams_once`: whether the settings of verl's SGLang have `incremental_streaming_output`.
        `deterministic`: equal prompts and seeds give equal replies. Matrix products on the CPU depend on the batch,
        so the server then runs one request at a time.
        """
        options = {
            "--skip-tokenizer-init": skip_tokenizer_init,
            "--incremental-streaming-output": streams_once,
            "--enable-deterministic-inference": deterministic,
        }
        return ServingConfig.model_validate(
            {
                "device": "cpu",
                "dtype": dtype,
                "threads": self.threads,
                "max_running_requests": 1 if deterministic else self.max_running_requests,
                "python": self.python,
                "startup_timeout_s": self.startup_timeout_s,
                "extra_args": ("--skip-server-warmup", *(name for name, given in options.items() if given)),
                **(_adapters(model) if model is not None and serves_adapter(model) else {}),
            }
        )


def serving_of(rollout: Any, model: Any) -> ServingConfig:
    """Return how a server of verl's `RolloutConfig` and `HFModelConfig` runs."""
    streams_once = ((rollout.engine_kwargs or {}).get("sglang") or {}).get("incremental_streaming_output")
    settings = ServerSettings.of(rollout)
    return settings.serving(
        rollout.dtype, rollout.skip_tokenizer_init, model, bool(streams_once), bool(rollout.full_determinism)
    )


def serves_adapter(model: Any) -> bool:
    """Return whether verl loads its LoRA adapter into the servers. `model` is verl's `HFModelConfig`."""
    return bool(model.lora_rank) and not model.lora.get("merge", False)


def _adapters(model: Any) -> Mapping[str, Any]:
    targets = model.target_modules
    every = {} if targets == "all-linear" else {"lora_targets": tuple(targets)}
    return {"lora_rank": model.lora_rank, "max_adapters": 1} | every


def model_of(rollout: Any, model: Any) -> ModelConfig:
    """Return the model of verl's `RolloutConfig` and `HFModelConfig`."""
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    # SGLang needs room for one token beyond prompt and response.
    return ModelConfig(
        path=Path(model.path).absolute(),
        context_length=max(length + 1, 16),
        routed_experts=bool(rollout.enable_rollout_routing_replay),
        trust_remote_code=bool(getattr(model, "trust_remote_code", False)),
    )
