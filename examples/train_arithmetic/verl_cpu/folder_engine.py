"""A checkpoint engine over a folder that trainer and servers share: for `separate_async` on one machine.

verl imports it through `checkpoint_engine.custom_backend_module`; its `backend` is "shared_folder". The first trainer
writes one file per update, under a name that all processes know. Each server's worker waits for the file and reads
it. The file is deleted when all are done.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from rollout_backend.errors import ServingError
from verl_cpu.replica_settings import memory_folder

BACKEND = "shared_folder"
_POLL_S = 0.05


@CheckpointEngineRegistry.register(BACKEND)
class SharedFolderEngine(CheckpointEngine):  # type: ignore[misc]
    """`folder` and `timeout_s` are set by `checkpoint_engine.engine_kwargs.shared_folder`."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, folder: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self._is_master = is_master
        self._folder = Path(folder) if folder else memory_folder()
        self._timeout_s = timeout_s
        self._file = Path()

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return one file name for all processes, a new one for each update."""
        name = f"rollout-weights-{uuid.uuid4().hex}.safetensors"
        return {"name": [name] * actor_wg_world_size}, {"name": [name] * rollout_world_size}

    def init_process_group(self, name: str) -> None:
        self._file = self._folder / name

    def finalize(self) -> None:
        if self._is_master:
            self._file.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        # All trainers iterate over the tensors, because gathering one needs all trainers; only one keeps them.
        tensors = {name: tensor.detach().cpu() for name, tensor in weights}
        if self._is_master:
            await asyncio.to_thread(self._write, tensors)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors. Raise ServingError if no weights arrive in time."""
        deadline = time.monotonic() + self._timeout_s
        while not self._file.exists():
            if time.monotonic() > deadline:
                raise ServingError(
                    f"no weights in {self._file} within {self._timeout_s:g} s: the trainer failed, or does not share "
                    "the folder; set checkpoint_engine.engine_kwargs.shared_folder.folder"
                )
            await asyncio.sleep(_POLL_S)
        with safe_open(self._file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no dict
                yield name, tensors.get_tensor(name)

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".part")
        # Clones: safetensors refuses tensors that share memory, as tied ones do.
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, partial)
        os.replace(partial, self._file)
