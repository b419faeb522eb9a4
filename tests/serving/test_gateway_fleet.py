"""Several gateways as one: real processes, real keys, and a real Ray on this machine."""

import asyncio
import os
import signal
import socket
from collections import Counter

import httpx
import openai
import pytest

from agent_wrapper.heartbeat import send_heartbeats
from agent_wrapper.trajectory import TrajectoryUnavailable, fetch_trajectory
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError, ServingError, StartupError
from rollout_backend.gateway.sharding import shard_of
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet, Shard
from rollout_backend.serving.gateway_process import GatewayProcess


def config(**sections) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "model": {"path": BYTE_MODEL, "name": "m"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
            **sections,
        }
    )


def session_of(shard: int, shards: int = 2) -> str:
    return next(name for name in (f"session-{i}" for i in range(1000)) if shard_of(name, shards) == shard)


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


async def call(endpoint, question: str = "Hello"):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        return await client.chat.completions.create(
            model=endpoint.name, messages=[{"role": "user", "content": question}]
        )


@pytest.fixture
def engine():
    with ScriptedEngine(["one", "two", "three"]) as engine:
        yield engine


@pytest.fixture
async def fleet(engine, tmp_path):
    fleet = GatewayFleet(config(gateway={"processes": 2}), engine.url, tmp_path)
    await fleet.stop()  # of what never ran is nothing
    await fleet.start()
    yield fleet
    await fleet.stop()


def test_sessions_are_dealt_evenly_and_for_good():
    counts = Counter(shard_of(f"session-{i}", 4) for i in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 900
    # Keys outlive a process: the next one must deal as this one does.
    assert [shard_of(f"session-{i}", 4) for i in range(8)] == [3, 0, 1, 0, 0, 3, 0, 2]


@pytest.mark.parametrize(
    ("gateway", "match"),
    [
        ({"processes": 2, "public_url": "https://gw.example"}, r"gateway: public_url must distinguish 2 processes"),
        ({"processes": 2, "port": 65535}, "leaves no room for 2 processes"),
        ({"public_url": "https://gw.example:{port}"}, "port must be set"),
        ({"tls_key": "key.pem"}, "belong together"),
        ({"kind": "ray"}, r"set router\.host"),
    ],
)
def test_settings_that_cannot_work_are_refused(gateway, match):
    with pytest.raises(ConfigError, match=match):
        config(gateway=gateway)


@pytest.mark.parametrize(
    ("template", "urls"),
    [
        ("https://gw-{shard}.example/", ("https://gw-0.example", "https://gw-1.example")),
        ("https://gw.example/s/{shard}", ("https://gw.example/s/0", "https://gw.example/s/1")),
        ("http://gw.example:{port}", ("http://gw.example:8000", "http://gw.example:8001")),
    ],
)
def test_the_way_from_outside_names_the_shard(template, urls, tmp_path):
    settings = config(gateway={"processes": 2, "port": 8000, "public_url": template})
    shards = [GatewayProcess(settings, "http://e", tmp_path / "log", shard=i) for i in range(2)]
    assert tuple(shard.public_url for shard in shards) == urls


async def test_two_processes_are_one_gateway(fleet, claims):
    assert len(set(fleet.urls)) == 2
    await a_key_is_good_at_its_own_shard_only(fleet, claims)
    sessions = [session_of(0), session_of(1)]
    for session, url in zip(sessions, fleet.urls, strict=True):
        endpoint = fleet.endpoint(claims(session))
        assert endpoint.base_url == f"{url}/v1"
        for answer in ("one", "two"):
            assert (await call(endpoint)).choices[0].message.content == answer
    stats = await fleet.stats()
    assert (stats.calls, stats.sessions_open, stats.segments) == (4, 2, {"first_call": 2, "branched": 2})
    trajectory = await fetch_trajectory(fleet.endpoint(claims(sessions[0])), 10)
    assert len(trajectory.segments) == 2
    await fleet.revoke([sessions[1], "never seen"])
    with pytest.raises(openai.APIStatusError, match="closed"):
        await call(fleet.endpoint(claims(sessions[1])))
    stats = await fleet.stats()
    assert (stats.sessions_open, stats.sessions_closed, stats.errors) == (
        0,
        3,
        {"session_closed": 1, "wrong_shard": 2},
    )


async def test_each_gateway_tells_what_it_has_heard(fleet, claims):
    assert fleet.same_machine
    sessions = [session_of(0), session_of(1)]
    beating = [
        asyncio.create_task(send_heartbeats(endpoint.heartbeat_url, endpoint.api_key, 0.1))
        for endpoint in map(fleet.endpoint, map(claims, sessions))
    ]
    heard: list[set[str]] = [set(), set()]
    async with asyncio.timeout(20):
        while not all(heard):
            for answer, known in zip(await fleet.heartbeats(), heard, strict=True):
                known.update(answer.beats)
    assert heard == [{sessions[0]}, {sessions[1]}]
    await fleet.revoke(sessions)
    async with asyncio.timeout(20):
        await asyncio.gather(*beating)  # they end once the sessions are closed
    fleet._shards[1]._process._process.kill()
    await fleet._shards[1].wait()
    assert [answer is None for answer in await fleet.heartbeats()] == [False, True]


async def a_key_is_good_at_its_own_shard_only(fleet, claims):
    there = fleet.endpoint(claims(session_of(0)))
    elsewhere = there.model_copy(
        update={"base_url": f"{fleet.urls[1]}/v1", "trajectory_url": f"{fleet.urls[1]}/v1/rollout/trajectory"}
    )
    with pytest.raises(openai.APIStatusError, match="gateway 0 of 2") as caught:
        await call(elsewhere)
    assert caught.value.status_code == 421
    with pytest.raises(TrajectoryUnavailable, match="421"):
        await fetch_trajectory(elsewhere, 10)
    assert (await fleet.stats()).sessions_open == 0  # nothing was opened


async def test_one_that_dies_is_named_with_its_log(fleet, claims):
    waiting = asyncio.create_task(fleet.failed())
    await asyncio.sleep(0)
    os.kill(fleet._shards[1]._process.pid, signal.SIGKILL)
    with pytest.raises(StartupError, match=r"gateway 1 of 2 ended with code -9.*gateway-1\.log"):
        await asyncio.wait_for(waiting, 20)
    assert (await call(fleet.endpoint(claims(session_of(0))))).choices[0].message.content == "one"
    with pytest.raises(ServingError, match="gateway 1 of 2 does not answer"):
        await fleet.stats()
    with pytest.raises(ServingError, match="gateway 1 of 2 does not answer"):
        await fleet.revoke([session_of(1), session_of(0)])
    with pytest.raises(openai.APIStatusError, match="closed"):  # the living one was told all the same
        await call(fleet.endpoint(claims(session_of(0))))


async def test_what_is_not_running_says_so(tmp_path):
    fleet = GatewayFleet(config(gateway={"processes": 2}), "http://e", tmp_path)
    with pytest.raises(ServingError, match="not running"):
        await fleet.revoke(["s"])


async def test_ports_follow_one_another_and_one_failure_stops_all(engine, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] - 1
        fleet = GatewayFleet(config(gateway={"processes": 2, "port": port}), engine.url, tmp_path)
        with pytest.raises(StartupError, match=rf"gateway 1 of 2 cannot listen on 127\.0\.0\.1:{port + 1}"):
            await fleet.start()
    assert not listens("127.0.0.1", port)


def test_counts_add_up():
    part = GatewayStats(
        **{name: 1 for name, field in GatewayStats.model_fields.items() if field.annotation is int},
        **{
            name: {"a": 1, name: 2}
            for name, field in GatewayStats.model_fields.items()
            if field.annotation is not int
        },
    )
    total = GatewayStats.total([part, part, part]).model_dump()
    assert total == {
        name: 3 if isinstance(value, int) else {"a": 3, name: 6} for name, value in part.model_dump().items()
    }


# --- on a Ray cluster -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def on_ray(**gateway) -> RolloutConfig:
    settings = {"kind": "ray", "processes": 2, "startup_timeout_s": 60, **gateway}
    return config(gateway=settings, router={"host": "192.0.2.1"})  # not asked: the engine's own URL is used here


async def test_gateways_as_ray_actors(ray, engine, tmp_path, claims):
    fleet = GatewayFleet(on_ray(), engine.url, tmp_path)
    assert {name for name in vars(Shard) if not name.startswith("_")} <= {*dir(GatewayProcess), "journal_id"}
    try:
        await fleet.start()
        assert ray.available_resources().get("CPU", 0) == 0
        assert all(url.startswith(f"http://{ray.util.get_node_ip_address()}:") for url in fleet.urls)
        for shard in range(2):
            endpoint = fleet.endpoint(claims(session_of(shard)))
            assert endpoint.base_url == f"{fleet.urls[shard]}/v1"
            assert (await call(endpoint)).choices[0].message.content == "one"
        assert (await fleet.stats()).calls == 2
        await fleet.revoke([session_of(1)])
        with pytest.raises(openai.APIStatusError, match="closed"):
            await call(fleet.endpoint(claims(session_of(1))))
        waiting = asyncio.create_task(fleet.failed())
        await asyncio.sleep(0)
        ray.kill(fleet._shards[0].handle)
        with pytest.raises(StartupError, match="gateway 0 of 2: its Ray actor died"):
            await asyncio.wait_for(waiting, 20)
        with pytest.raises(ServingError, match="gateway 0 of 2"):
            await fleet.stats()
    finally:
        await fleet.stop()
    assert not any(listens(url.host, url.port) for url in map(httpx.URL, fleet.urls))


async def test_a_cluster_without_room_says_what_to_change(ray, engine, tmp_path):
    fleet = GatewayFleet(on_ray(processes=3, startup_timeout_s=0.5), engine.url, tmp_path)
    with pytest.raises(StartupError, match=r"had a CPU free within 0\.5 s: lower gateway\.processes"):
        await fleet.start()


async def test_what_goes_wrong_on_the_other_machine_is_told(ray, engine, tmp_path):
    settings = on_ray(processes=1).model_copy(update={"model": config(model={"path": str(tmp_path)}).model})
    fleet = GatewayFleet(settings, engine.url, tmp_path)
    with pytest.raises(StartupError, match="holds no tokenizer"):
        await fleet.start()


def test_the_router_is_reached_at_this_machines_address(ray, tmp_path):
    from rollout_backend.serving.ray_gateway import ray_shards

    settings = config(gateway={"kind": "ray"}, router={"host": "0.0.0.0"})
    (shard,) = asyncio.run(
        ray_shards(settings, "http://127.0.0.1:4321", [tmp_path / "log"], ("s" * 32, None), [None], "life")
    )
    assert shard._make("192.0.2.2")._engine_url == f"http://{ray.util.get_node_ip_address()}:4321"
