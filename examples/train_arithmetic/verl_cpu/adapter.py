"""Send weights or a LoRA adapter from the process that has them to the server, as a folder in memory.

The process is a training worker (synchronous training: each worker has one server) or verl's `CheckpointEngineWorker`
next to a standalone server, which received them through a checkpoint engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.adapters import CONFIG, WEIGHTS
from rollout_backend.model.serving.weights import ModelFolder
from verl_cpu.replica import actor_name
from verl_cpu.replica_settings import ServerSettings, serves_adapter

_WRAPPED = ".base_layer."  # verl names a weight with an adapter so, for vLLM

logger = logging.getLogger(__name__)


class DiskAdapter(BaseRollout):  # type: ignore[misc]
    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        # A training worker gets no replica rank. Servers have one device, so its server has the worker's rank.
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._settings = ServerSettings.of(self.config)
        self._dtype = self.config.dtype
        self._model = ModelFolder(self.model_config.path)
        self._serves_adapter = serves_adapter(self.model_config)
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Return the memory of weights or cache to the server; verl resumes the cache after the new weights.

        With an adapter the server keeps its weights. verl knows that of the rollout named "sglang" alone.
        """
        released = [tag for tag in tags if tag != "weights" or not self._serves_adapter]
        if released:
            await self._actor().wake_up.remote(released)

    async def release(self) -> None:
        await self._actor().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = False,
        **_: Any,
    ) -> None:
        """Load `(name, tensor)` pairs; return once the server serves them as version `global_steps`.

        They are an adapter's if there is a `peft_config`, unless `base_sync_done` is False: then they are the weights
        that the adapter belongs to.

        Raises:
            WeightsMismatch: names or shapes are not the model's; nothing was sent.
            ServingError: the server refused them, or died.
            ConfigError: for weights in deltas.
        """
        if wire_format != "named_tensors":
            raise ConfigError(f"the CPU takes no weights as {wire_format}: choose another checkpoint_engine.backend")
        began = time.monotonic()
        tensors = {name.replace(_WRAPPED, "."): tensor async for name, tensor in ensure_async_iterator(weights)}
        # Deleted once the server has read it: a run must leave nothing in the machine's memory.
        with TemporaryDirectory(prefix="rollout-weights-", dir=self._settings.weights_dir) as name:
            folder = Path(name)
            if peft_config is not None and base_sync_done:
                await asyncio.to_thread(_write_adapter, folder, peft_config, tensors)
                load = self._actor().load_adapter
            else:
                await asyncio.to_thread(self._model.write, tensors, folder, self._dtype)
                load = self._actor().update_weights
            saved = time.monotonic()
            await load.remote(folder, global_steps)
        logger.info(
            "weights of step %s: saved in %.2f s, loaded in %.2f s",
            global_steps,
            saved - began,
            time.monotonic() - saved,
        )

    def _actor(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(actor_name(self.replica_rank))
        return self._server


def _write_adapter(folder: Path, peft_config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter as PEFT's `save_pretrained` does."""
    (folder / CONFIG).write_text(json.dumps(peft_config, default=list))  # target_modules is a set
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
