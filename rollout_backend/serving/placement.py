"""Where the processes of one server run: the resources that each machine reserves, and each machine's part. Pure.

A server runs on `serving.nodes_per_server` machines with one process group on each, which SGLang calls a node. Node 0
answers requests; the others only compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_backend.config import ServingConfig
from rollout_backend.core.formats import count


@dataclass(frozen=True)
class ServerNode:
    """One node of a server: where it listens, which GPUs it uses, and how it finds the other nodes."""

    host: str
    port: int
    first_gpu: int = 0  # among the GPUs that the process sees
    rank: int = 0
    rendezvous: str = ""  # HOST:PORT on node 0's machine, for a server with several nodes


@dataclass(frozen=True)
class Placement:
    """What one server reserves in a Ray cluster: a placement group with one bundle per node."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]

    @classmethod
    def of(cls, serving: ServingConfig) -> Placement:
        """Return the placement of a server with these settings."""
        nodes = serving.nodes_per_server
        processes = max(1, serving.gpus_per_server // nodes)
        if serving.device == "cpu":
            bundle = {"CPU": float(processes * serving.threads)}
        else:
            bundle = {"CPU": 1.0, "GPU": float(processes)}
        return cls((bundle,) * nodes, "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD")

    def __str__(self) -> str:
        each = count(int(self.bundles[0][self._unit]), self._unit)
        nodes = len(self.bundles)
        return f"{each} on one machine" if nodes == 1 else f"{each} on each of {nodes} machines"

    @property
    def _unit(self) -> str:
        return "GPU" if "GPU" in self.bundles[0] else "CPU"

    def describe(self, machines: Sequence[Mapping[str, float]]) -> str:
        """Return the free GPUs of machines, or their free CPUs if the server needs no GPU."""
        each = " + ".join(f"{machine.get(self._unit, 0):g}" for machine in machines)
        return f"{each or 0} {self._unit}s on {count(len(machines), 'machine')}"

    def servers_on(self, machines: Iterable[Mapping[str, float]]) -> int:
        """Return how many servers machines with these free resources can hold at the same time."""
        bundle, nodes = self.bundles[0], len(self.bundles)
        slots = [int(min(machine.get(name, 0) // need for name, need in bundle.items())) for machine in machines]
        servers = sum(slots) // nodes
        # The nodes of a server are on different machines, so a machine holds one node of each server at most.
        while servers and sum(min(slot, servers) for slot in slots) < servers * nodes:
            servers -= 1
        return servers
