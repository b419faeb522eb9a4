"""Engines as Ray actors: each placed on GPUs of the cluster, and otherwise a `LocalEngine` on that machine.

The actor holds the GPUs for as long as the engine lives, so Ray gives them to nobody else, and tells the engine
which they are. This package must be installed where Ray's workers run, and `model.path` and `serving.python` exist
there; an engine's log is written on its own machine. `ray` is imported when the first engine is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import StartupError
from rollout_backend.serving.engine import LocalEngine, MakeCommand, MakeEngine
from rollout_backend.serving.sglang import engine_command

_STOP_S = 15.0
_Reply = TypeVar("_Reply")


async def ray_engines(
    model: ModelConfig, serving: ServingConfig, log_dir: Path, command: MakeCommand = engine_command
) -> MakeEngine:
    """Joins the Ray cluster, if this process has not done so, and returns what makes its engines.

    The cluster is the one of RAY_ADDRESS, else one that runs on this machine, else a new one.
    """
    import ray

    if not ray.is_initialized():
        await asyncio.to_thread(ray.init, log_to_driver=False, include_dashboard=False)
    return lambda i: RayEngine(f"engine-{i}", model, serving, log_dir.absolute() / f"engine-{i}.log", command)


class RayEngine:
    """An engine on whichever machine of the cluster has `serving.tensor_parallel` GPUs free."""

    def __init__(
        self, name: str, model: ModelConfig, serving: ServingConfig, log: Path, command: MakeCommand = engine_command
    ) -> None:
        self._name = name
        self._serving = serving
        self._arguments = (name, model, serving, log, command)
        self._actor: Any = None
        self._placed = False
        self.url = ""

    async def start(self) -> None:
        import ray

        gpus = self._serving.tensor_parallel
        self._actor = ray.remote(_Host).options(num_cpus=1, num_gpus=gpus, max_restarts=0).remote(*self._arguments)
        try:
            async with asyncio.timeout(self._serving.startup_timeout_s):
                await self._ask(self._actor.__ray_ready__.remote())
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no machine of the Ray cluster had {gpus} GPUs free within "
                f"{self._serving.startup_timeout_s:g} s; the whole cluster has {_gpus(ray.available_resources())} of "
                f"{_gpus(ray.cluster_resources())} free: lower serving.servers or serving.tensor_parallel"
            ) from None
        self._placed = True
        self.url = await self._ask(self._actor.start.remote())

    async def wait(self) -> str:
        try:
            return await self._ask(self._actor.wait.remote())
        except StartupError as error:
            return str(error)

    async def stop(self) -> None:
        import ray

        if self._actor is None:
            return
        try:
            if self._placed:  # else nobody is there to answer
                async with asyncio.timeout(_STOP_S):
                    await self._ask(self._actor.stop.remote())
        except (StartupError, TimeoutError):
            pass  # its machine is gone, or it hangs: what is left of it is killed with the actor
        finally:
            ray.kill(self._actor)

    async def tail(self) -> str:
        try:
            async with asyncio.timeout(_STOP_S):
                return await self._ask(self._actor.tail.remote())
        except (StartupError, TimeoutError) as error:
            return str(error)

    async def _ask(self, reply: Awaitable[_Reply]) -> _Reply:
        """Raises StartupError for what went wrong there, or on the way."""
        import ray.exceptions

        try:
            return await reply
        except ray.exceptions.RayTaskError as error:
            raise StartupError(str(error.cause)) from None
        except ray.exceptions.RayActorError as error:
            raise StartupError(f"{self._name}: its Ray actor died: {error}") from None


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
