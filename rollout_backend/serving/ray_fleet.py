"""Engines as Ray actors: each placed on GPUs of the cluster, and otherwise a `LocalEngine` on that machine.

The actor holds the GPUs for as long as the engine lives, so Ray gives them to nobody else, and tells the engine
which they are. This package must be installed where Ray's workers run, and `model.path` and `serving.python` exist
there; an engine's log is written on its own machine. `ray` is imported when the first engine is wanted.
"""

from __future__ import annotations

from pathlib import Path

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import StartupError
from rollout_backend.serving.engine import LocalEngine, MakeCommand, MakeEngine
from rollout_backend.serving.ray_actor import RayActor, join_cluster
from rollout_backend.serving.sglang import engine_command


async def ray_engines(
    model: ModelConfig, serving: ServingConfig, log_dir: Path, command: MakeCommand = engine_command
) -> MakeEngine:
    """Joins the Ray cluster, if this process has not done so, and returns what makes its engines.

    The cluster is the one of RAY_ADDRESS, else one that runs on this machine, else a new one.
    """
    await join_cluster()
    return lambda i: RayEngine(f"engine-{i}", model, serving, log_dir.absolute() / f"engine-{i}.log", command)


class RayEngine:
    """An engine on whichever machine of the cluster has `serving.tensor_parallel` GPUs free."""

    def __init__(
        self, name: str, model: ModelConfig, serving: ServingConfig, log: Path, command: MakeCommand = engine_command
    ) -> None:
        self._name = name
        self._serving = serving
        arguments = (name, model, serving, log, command)
        self._actor = RayActor(name, _Host, arguments, num_gpus=serving.tensor_parallel)
        self.url = ""

    async def start(self) -> None:
        import ray

        try:
            await self._actor.place(self._serving.startup_timeout_s)
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no machine of the Ray cluster had {self._serving.tensor_parallel} GPUs free within "
                f"{self._serving.startup_timeout_s:g} s; the whole cluster has {_gpus(ray.available_resources())} of "
                f"{_gpus(ray.cluster_resources())} free: lower serving.servers or serving.tensor_parallel"
            ) from None
        self.url = await self._actor.ask("start")

    async def wait(self) -> str:
        try:
            ended: str = await self._actor.ask("wait")
        except StartupError as error:
            return str(error)
        return ended

    async def stop(self) -> None:
        await self._actor.stop()

    async def tail(self) -> str:
        return await self._actor.tail()


class _Host:
    """The actor: a `LocalEngine` on the machine that Ray chose."""

    def __init__(
        self, name: str, model: ModelConfig, serving: ServingConfig, log: Path, command: MakeCommand
    ) -> None:
        import ray.util

        self._engine = LocalEngine(name, model, serving, log, host=ray.util.get_node_ip_address(), command=command)

    async def start(self) -> str:
        await self._engine.start()
        return self._engine.url

    async def wait(self) -> str:
        return await self._engine.wait()

    async def stop(self) -> None:
        await self._engine.stop()

    async def tail(self) -> str:
        return await self._engine.tail()


def _gpus(resources: dict[str, float]) -> str:
    return f"{resources.get('GPU', 0):g}"
