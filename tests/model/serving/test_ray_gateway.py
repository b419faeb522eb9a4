"""Gateways as Ray actors on a cluster of two machines with an address each."""

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest

from builders import complete, eventually, listens, run_config, session_of
from ray_cluster import machine, ray_machines
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.ray_servers import RayActor
from rollout_backend.workbench.local.scripted import ScriptedEngine


@pytest.fixture
def engine():
    with ScriptedEngine(["one"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def machines():
    """A cluster of two machines with a CPU each. The last test of this module loses one."""
    with ray_machines({"num_cpus": 1}, [{"num_cpus": 1}]) as machines:
        yield machines


def on_ray(**gateway) -> RolloutConfig:
    settings = {"kind": "ray", "processes": 2, "startup_timeout_s": 120, **gateway}
    return run_config(gateway=settings, router={"host": "192.0.2.1"})  # not used: the fleet gets the engine's own URL


@pytest.mark.slow
async def test_a_gateway_whose_actor_is_killed_while_the_run_starts_gets_another_actor(
    machines, engine, tmp_path, claims
):
    import ray

    events: list[str] = []
    fleet = GatewayFleet(
        on_ray(processes=1),
        engine.url,
        tmp_path,
        journals=tmp_path / "j",
        on_event=lambda event: events.append(event.kind),
    )
    starting = asyncio.create_task(fleet.start())
    try:
        await eventually(lambda: fleet._shards and fleet._shards[0].handle is not None)
        ray.kill(first := fleet._shards[0].handle)
        await starting
        assert fleet._shards[0].handle is not first
        assert await complete(fleet.endpoint(claims(session_of(0)))) == "one"
        await eventually(lambda: events == ["died", "restarted"])
    finally:
        await fleet.stop()


@pytest.mark.slow
async def test_a_cluster_without_free_cpus_reports_the_setting(machines, engine, tmp_path):
    fleet = GatewayFleet(on_ray(processes=3, startup_timeout_s=0.5), engine.url, tmp_path, journals=tmp_path / "j")
    with pytest.raises(StartupError, match=r"had a CPU free within 0\.5 s: lower gateway\.processes"):
        await fleet.start()


@pytest.mark.slow
async def test_an_error_on_the_other_machine_is_reported(machines, engine, tmp_path):
    settings = on_ray(processes=1).model_copy(update={"model": run_config(model={"path": str(tmp_path)}).model})
    fleet = GatewayFleet(settings, engine.url, tmp_path, journals=tmp_path / "j")
    with pytest.raises(StartupError, match="holds no tokenizer"):
        await fleet.start()


@pytest.mark.slow
async def test_an_actor_that_is_killed_for_its_memory_has_died():
    from ray.exceptions import OutOfMemoryError

    async def call(method: str) -> None:
        raise OutOfMemoryError("the node is low on memory")

    actor = RayActor("engine-0", lambda host: None)
    actor.handle = SimpleNamespace(call=SimpleNamespace(remote=call))
    assert "engine-0: its Ray actor died: " in await actor.wait()


@pytest.mark.slow
def test_the_router_is_reached_at_this_machines_address(machines, tmp_path):
    import ray

    settings = run_config(gateway={"kind": "ray"}, router={"host": "0.0.0.0"})
    fleet = GatewayFleet(settings, "http://127.0.0.1:4321", tmp_path, journals=tmp_path / "j")
    [shard] = asyncio.run(fleet._make())
    assert shard._make("192.0.2.2")._engine_url == f"http://{ray.util.get_node_ip_address()}:4321"


@pytest.mark.slow
async def test_one_gateway_on_each_machine(machines, engine, tmp_path, claims):
    fleet = GatewayFleet(on_ray(), engine.url, tmp_path, journals=tmp_path / "j")
    try:
        await fleet.start()
        assert len({machine(url) for url in fleet.urls}) == 2
        for shard in range(2):
            endpoint = fleet.endpoint(claims(session_of(shard)))
            assert endpoint.base_url == f"{fleet.urls[shard]}/v1"
            assert await complete(endpoint) == "one"
        assert (await fleet.stats()).calls == 2
        await fleet.revoke([session_of(1)])
        with pytest.raises(openai.APIStatusError, match="closed"):
            await complete(fleet.endpoint(claims(session_of(1))))
        waiting = asyncio.create_task(fleet.failed())
        await asyncio.sleep(0)
        await machines.lose("127.0.0.2")
        lost = next(i for i, url in enumerate(fleet.urls) if machine(url) == "127.0.0.2")
        with pytest.raises(StartupError, match=f"gateway {lost} of 2: its Ray actor died"):
            await asyncio.wait_for(waiting, 120)
        with pytest.raises(ServingError, match=f"gateway {lost} of 2"):
            await fleet.stats()
    finally:
        await fleet.stop()
    assert not any(listens(url.host, url.port) for url in map(httpx.URL, fleet.urls))
