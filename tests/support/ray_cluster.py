"""A cluster of Ray on this machine: each simulated machine has an address, and can be lost and come back."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

REMOVABLE = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Machines:
    """The first machine runs the cluster, has this machine's address, and cannot be lost."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address = cluster.address

    async def lose(self, address: str) -> None:
        """Kill a machine with all its processes, as a power cut does."""
        lost = next(node for node in self._cluster.list_all_nodes() if node.node_ip_address == address)
        await asyncio.to_thread(self._cluster.remove_node, lost, allow_graceful=False)

    def add(self, address: str, **resources: Any) -> None:
        """Let a machine join. Blocks for seconds, because Ray wants the main thread for it."""
        self._cluster.add_node(node_ip_address=address, **resources)


@contextmanager
def ray_machines(first: dict[str, int], others: Sequence[dict[str, Any]]) -> Iterator[Machines]:
    """Run a cluster with these resources per machine, and join it."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    with ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        # Ray lowers the priority of its workers: on a busy machine an engine in an actor would take minutes to start.
        # The simulated machines share this one's memory, and Ray would kill engines when others use it.
        environ = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
        stack.enter_context(mock.patch.dict(os.environ, environ))
        cluster.add_node(include_dashboard=False, **first)
        for address, resources in zip(REMOVABLE, others, strict=False):
            cluster.add_node(node_ip_address=address, **resources)
        ray.init(address=cluster.address, log_to_driver=False)
        yield Machines(cluster)


def machine(url: str) -> str:
    """Return the address of the machine that serves a URL."""
    return urlsplit(url).hostname or ""
