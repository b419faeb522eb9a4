"""Engines as Ray actors (`serving.kind=ray`), each on as many machines and GPUs as its settings name.

A server reserves its machines as one placement group, with an actor on each machine. An actor holds its GPUs as long
as it lives, so Ray assigns them to no other actor, and its process sees only these GPUs.

Invariants:

- A server that spans machines starts and ends as one: if a machine or a process of it is lost, the others are ended,
  and the fleet restarts the server where the cluster has room.
- While the cluster has no room, the engine says what it waits for, and waits `serving.resources_timeout_s` at most.

This package must be installed where Ray's workers run, and `model.path` and `serving.python` must exist there. An
engine's log is written on its own machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from rollout_backend.config import ModelConfig, RolloutConfig, ServingConfig
from rollout_backend.errors import StartupError
from rollout_backend.serving.engine import REPORT_WAIT_AFTER_S, EngineFactory
from rollout_backend.serving.local_engine import LocalEngine, MakeCommand
from rollout_backend.serving.placement import Placement
from rollout_backend.serving.ray_actor import RayActor, join_cluster
from rollout_backend.serving.sglang import engine_command
from rollout_backend.serving.supervisor import first_of

_POLL_S = 0.5
_ACTOR_S = 120.0  # for a process of Ray to start on a reserved machine


class RayEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=ray`."""

    takes_weights = True

    def __init__(self, config: RolloutConfig, log_dir: Path, command: MakeCommand = engine_command) -> None:
        servers = config.serving.servers
        self.count = 0 if servers == "auto" else servers
        self._config = config
        self._log_dir = log_dir.absolute()
        self._command = command

    async def open(self) -> None:
        """Join the Ray cluster, unless this process has, and count the engines of `serving.servers=auto`."""
        await join_cluster()
        if self._config.serving.servers == "auto":
            placement = Placement.of(self._config.serving)
            machines = await asyncio.to_thread(_free_resources)
            self.count = placement.servers_on(machines)
            if not self.count:
                raise StartupError(
                    f"serving.servers=auto: the Ray cluster has no room for a server, which needs {placement}; "
                    f"free are {placement.describe(machines)}"
                )

    def make(self, number: int) -> RayEngine:
        name = f"engine-{number}"
        config = self._config
        return RayEngine(name, config.model, config.serving, self._log_dir / f"{name}.log", self._command)


class RayEngine:
    """A server on `serving.nodes_per_server` machines of the cluster. Node 0 has its URL."""

    def __init__(
        self, name: str, model: ModelConfig, serving: ServingConfig, log: Path, command: MakeCommand = engine_command
    ) -> None:
        self._name = name
        self._model = model
        self._serving = serving
        self._log = log
        self._command = command
        self._placement = Placement.of(serving)
        self._group: Any = None
        self._nodes: list[RayActor] = []
        self.url = ""

    async def reserve(self) -> AsyncIterator[str]:
        """Reserve the machines. Yield once what the engine waits for.

        Raises:
            StartupError: the machines did not become free within `serving.resources_timeout_s`.
        """
        from ray.util.placement_group import placement_group

        began, reported = time.monotonic(), False
        bundles = [dict(bundle) for bundle in self._placement.bundles]
        self._group = placement_group(bundles, strategy=self._placement.strategy)
        while not await asyncio.to_thread(self._group.wait, _POLL_S):
            waited = time.monotonic() - began
            if waited > self._serving.resources_timeout_s:
                raise StartupError(
                    f"{self._name}: the Ray cluster did not have {self._placement} free within "
                    f"{self._serving.resources_timeout_s:g} s (serving.resources_timeout_s); free are "
                    f"{await self._free()}: add machines, or lower serving.servers or "
                    "the parallel sizes"
                )
            if not reported and waited > REPORT_WAIT_AFTER_S:
                reported = True
                yield f"waits for {self._placement}; free are {await self._free()}"

    async def _free(self) -> str:
        return self._placement.describe(await asyncio.to_thread(_free_resources))

    async def start(self) -> None:
        self._nodes = [self._node(rank) for rank in range(len(self._placement.bundles))]
        try:
            await asyncio.gather(*(node.place(_ACTOR_S) for node in self._nodes))
        except TimeoutError:
            raise StartupError(
                f"{self._name}: Ray did not start a process on its machine within {_ACTOR_S:g} s"
            ) from None
        first = self._nodes[0]
        rendezvous = await first.call("rendezvous") if len(self._nodes) > 1 else ""
        await asyncio.gather(*(node.call("start", rendezvous) for node in self._nodes))
        self.url = await first.read("url")

    async def wait(self) -> str:
        """Return how the first node that ended did so."""
        return await first_of(*(node.wait() for node in self._nodes))

    async def stop(self) -> None:
        """End the server on all its machines, and free them."""
        from ray.util.placement_group import remove_placement_group

        try:
            await asyncio.gather(*(node.stop() for node in self._nodes))
        finally:
            if self._group is not None:
                await asyncio.to_thread(remove_placement_group, self._group)
                self._group = None

    async def log_tail(self) -> str:
        return await self._nodes[0].log_tail() if self._nodes else ""

    def _node(self, rank: int) -> RayActor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._placement.bundles[rank]
        several = len(self._placement.bundles) > 1
        name = f"{self._name}, node {rank}" if several else self._name
        log = self._log.with_suffix(f".node-{rank}.log") if several else self._log
        return RayActor(
            name,
            _maker(name, self._model, self._serving, log, rank, self._command),
            cpus=bundle["CPU"],
            gpus=bundle.get("GPU", 0.0),
            strategy=PlacementGroupSchedulingStrategy(self._group, rank),
        )


def _maker(
    name: str, model: ModelConfig, serving: ServingConfig, log: Path, rank: int, command: MakeCommand
) -> Callable[[str], LocalEngine]:
    return lambda host: LocalEngine(name, model, serving, log, host=host, rank=rank, command=command)


def _free_resources() -> list[Mapping[str, float]]:
    """Return the free resources of each machine of the cluster."""
    from ray._private.state import available_resources_per_node  # the public function adds all machines up

    return [*available_resources_per_node().values()]
