"""Engines as Ray actors (`serving.kind=ray`): each is a `LocalEngine` on a machine with enough free GPUs.

The actor holds the GPUs as long as the engine lives, so Ray assigns them to no other actor. The engine sees only
these GPUs. This package must be installed where Ray's workers run, and `model.path` and `serving.python` must exist
there. An engine's log is written on its own machine.
"""

from __future__ import annotations

from pathlib import Path

from rollout_backend.config import ModelConfig, RolloutConfig, ServingConfig
from rollout_backend.errors import StartupError
from rollout_backend.serving.engine import EngineFactory
from rollout_backend.serving.local_engine import LocalEngine, MakeCommand
from rollout_backend.serving.ray_actor import RayActor, join_cluster
from rollout_backend.serving.sglang import engine_command


class RayEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=ray`."""

    def __init__(self, config: RolloutConfig, log_dir: Path, command: MakeCommand = engine_command) -> None:
        self.count = config.serving.servers
        self._config = config
        self._log_dir = log_dir.absolute()
        self._command = command

    async def open(self) -> None:
        """Join the Ray cluster, unless this process has."""
        await join_cluster()

    def make(self, number: int) -> RayEngine:
        name = f"engine-{number}"
        config = self._config
        return RayEngine(name, config.model, config.serving, self._log_dir / f"{name}.log", self._command)


class RayEngine(RayActor):
    """An engine on a machine of the cluster with `serving.tensor_parallel` free GPUs."""

    def __init__(
        self, name: str, model: ModelConfig, serving: ServingConfig, log: Path, command: MakeCommand = engine_command
    ) -> None:
        super().__init__(
            name,
            lambda host: LocalEngine(name, model, serving, log, host=host, command=command),
            num_gpus=serving.tensor_parallel,
        )
        self._serving = serving
        self.url = ""

    async def start(self) -> None:
        import ray

        try:
            await self.place(self._serving.startup_timeout_s)
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no machine of the Ray cluster had {self._serving.tensor_parallel} GPUs free within "
                f"{self._serving.startup_timeout_s:g} s; the whole cluster has {_gpus(ray.available_resources())} of "
                f"{_gpus(ray.cluster_resources())} free: lower serving.servers or serving.tensor_parallel"
            ) from None
        await self.call("start")
        self.url = await self.read("url")


def _gpus(resources: dict[str, float]) -> str:
    return f"{resources.get('GPU', 0):g}"
