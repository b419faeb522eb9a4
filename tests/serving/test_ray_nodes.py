"""Gateways as Ray actors on a cluster of two machines with an address each."""

import asyncio
from urllib.parse import urlsplit

import pytest

from builders import complete, run_config, session_of
from rollout_backend.errors import StartupError
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet


@pytest.fixture
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
async def test_one_gateway_on_each_machine(cluster, claims, tmp_path):
    machines = {node.node_ip_address for node in cluster.list_all_nodes()}
    assert len(machines) == 2
    config = run_config(
        gateway={"kind": "ray", "processes": 2, "startup_timeout_s": 120},
        router={"host": "192.0.2.1"},  # not used: the fleet gets the engine's own URL
    )
    with ScriptedEngine(["one"]) as engine:
        fleet = GatewayFleet(config, engine.url, tmp_path)
        try:
            await fleet.start()
            assert {urlsplit(url).hostname for url in fleet.urls} == machines
            for shard in range(2):
                given = fleet.endpoint(claims(session_of(shard)))
                assert urlsplit(given.base_url).hostname == urlsplit(fleet.urls[shard]).hostname
                assert await complete(given) == "one"
            waiting = asyncio.create_task(fleet.failed())
            lost = next(node for node in cluster.list_all_nodes() if node.node_ip_address == "127.0.0.2")
            await asyncio.to_thread(cluster.remove_node, lost)
            shard = next(i for i, url in enumerate(fleet.urls) if "127.0.0.2" in url)
            with pytest.raises(StartupError, match=f"gateway {shard} of 2"):
                await asyncio.wait_for(waiting, 120)
        finally:
            await fleet.stop()
