"""Several gateway processes addressed as one."""

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from urllib.parse import urlsplit

import openai
import pytest

from agent_wrapper.model_endpoint import probe_endpoint, send_heartbeats
from agent_wrapper.shared.trajectory import TrajectoryUnavailable, fetch_trajectory
from builders import complete, eventually, listens, run_config, session_of
from rollout_backend.core.session_key import shard_of
from rollout_backend.errors import ConfigError, ServingError, StartupError
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.gateway_process import own_address, public_url
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.scripted import ScriptedEngine
from tests.simulation.clock import in_virtual_time


@pytest.fixture
def engine():
    with ScriptedEngine(["one", "two", "three"]) as engine:
        yield engine


def test_sessions_are_distributed_evenly_and_deterministically():
    counts = Counter(shard_of(f"session-{i}", 4) for i in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 900
    # Keys outlive a process: the next one must distribute sessions in the same way.
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
def test_inconsistent_settings_are_refused(gateway, match):
    with pytest.raises(ConfigError, match=match):
        run_config(gateway=gateway)


@pytest.mark.parametrize(
    ("template", "urls"),
    [
        ("https://gw-{shard}.example/", ("https://gw-0.example", "https://gw-1.example")),
        ("https://gw.example/s/{shard}", ("https://gw.example/s/0", "https://gw.example/s/1")),
        ("http://{host}:1{shard}", (f"http://{own_address()}:10", f"http://{own_address()}:11")),
        ("http://gw.example:{port}", ("http://gw.example:8000", "http://gw.example:8001")),
    ],
)
def test_the_public_url_names_the_shard(template, urls):
    config = run_config(gateway={"processes": 2, "port": 8000, "public_url": template}).gateway
    assert tuple(public_url(config, shard, "") for shard in range(2)) == urls


@pytest.mark.slow
@pytest.mark.parametrize("public_url", ["auto", "http://{host}:{port}"])
async def test_agents_reach_a_gateway_at_the_address_and_the_port_of_the_settings(
    engine, start_fleet, claims, public_url
):
    fleet = await start_fleet(engine, gateway={"public_url": public_url, "port": (port := free_port())})
    endpoint = fleet.endpoint(claims())
    assert endpoint.base_url == f"http://{own_address()}:{port}/v1"
    assert await probe_endpoint(endpoint) is None


async def test_two_processes_serve_as_one_gateway_at_the_address_of_this_machine(engine, start_fleet, held, claims):
    fleet = await start_fleet(engine, gateway={"processes": 2, "public_url": "auto"})
    assert len(set(fleet.urls)) == 2
    await a_key_is_valid_at_its_own_shard_only(fleet, claims)
    sessions = [session_of(0), session_of(1)]
    for session, url in zip(sessions, fleet.urls, strict=True):
        endpoint = fleet.endpoint(claims(session))
        assert endpoint.base_url == f"http://{own_address()}:{urlsplit(url).port}/v1"
        assert await probe_endpoint(endpoint) is None
        for answer in ("one", "two"):
            assert await complete(endpoint) == answer
    stats = await fleet.stats()
    assert (stats.calls, stats.sessions_open, stats.segments) == (4, 2, {"first_call": 2, "branched": 2})
    trajectory = await fetch_trajectory(fleet.endpoint(claims(sessions[0])), 120)
    assert len(trajectory.segments) == 2
    await fleet.revoke([sessions[1], "never seen"])
    with pytest.raises(openai.APIStatusError, match="closed"):
        await complete(fleet.endpoint(claims(sessions[1])))
    stats = await fleet.stats()
    errors = {"session_closed": 1, "wrong_shard": 2}
    assert (stats.sessions_open, stats.sessions_closed, stats.errors) == (0, 3, errors)
    await calls_wait_while_engines_sleep_and_name_the_newest_version_of_their_adapter(fleet, engine, claims)
    await a_call_in_flight_is_aborted_by_a_pause_and_repeated(fleet, engine, held, claims)


@pytest.mark.slow
async def test_each_gateway_reports_heartbeats_and_a_dead_one_without_restarts_ends_the_run(
    engine, start_fleet, claims
):
    fleet = await start_fleet(engine, gateway={"processes": 2}, serving={"max_restarts": 0})
    assert fleet.same_machine
    sessions = [session_of(0), session_of(1)]
    beating = [
        asyncio.create_task(send_heartbeats(endpoint.heartbeat_url, endpoint.api_key, 0.1))
        for endpoint in map(fleet.endpoint, map(claims, sessions))
    ]
    heard: list[set[str]] = [set(), set()]
    async with asyncio.timeout(120):
        while not all(heard):
            for answer, known in zip(await fleet.heartbeats(), heard, strict=True):
                known.update(answer.beats)
    assert heard == [{sessions[0]}, {sessions[1]}]
    await fleet.revoke(sessions)
    async with asyncio.timeout(120):
        await asyncio.gather(*beating)  # they end once the sessions are closed
    waiting = asyncio.create_task(fleet.failed())
    await asyncio.sleep(0)
    os.kill(fleet._shards[1]._process.pid, signal.SIGKILL)
    with pytest.raises(StartupError, match=r"gateway 1 of 2 ended with code -9.*gateway-1\.log"):
        await asyncio.wait_for(waiting, 120)
    assert [answer is None for answer in await fleet.heartbeats()] == [False, True]
    alive = fleet.endpoint(claims(session_of(0, nth=1)))
    assert await complete(alive) == "one"
    with pytest.raises(ServingError, match="gateway 1 of 2 does not answer"):
        await fleet.stats()
    with pytest.raises(ServingError, match="gateway 1 of 2 does not answer"):
        await fleet.revoke([session_of(1), session_of(0, nth=1)])
    with pytest.raises(openai.APIStatusError, match="closed"):  # the other one has revoked its session
        await complete(alive)


async def a_key_is_valid_at_its_own_shard_only(fleet, claims):
    there = fleet.endpoint(claims(session_of(0)))
    elsewhere = there.model_copy(
        update={"base_url": f"{fleet.urls[1]}/v1", "trajectory_url": f"{fleet.urls[1]}/v1/rollout/trajectory"}
    )
    with pytest.raises(openai.APIStatusError, match="gateway 0 of 2") as caught:
        await complete(elsewhere)
    assert caught.value.status_code == 421
    with pytest.raises(TrajectoryUnavailable, match="421"):
        await fetch_trajectory(elsewhere, 120)
    assert (await fleet.stats()).sessions_open == 0  # nothing was opened


async def test_ports_are_consecutive_and_one_failure_stops_all(engine, tmp_path):
    with socket.socket() as taken:
        bound = False
        while not bound:  # another process may use the second port
            port = free_port()  # not a port that the kernel may give to a connection in the meantime
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port + 1))
                bound = True
        taken.listen()
        settings = run_config(gateway={"processes": 2, "port": port})
        fleet = GatewayFleet(settings, engine.url, tmp_path, journals=tmp_path / "j")
        with pytest.raises(
            StartupError, match=rf"gateway 1 of 2 cannot listen on 127\.0\.0\.1:{port + 1} .*gateway\.port"
        ):
            await fleet.start()
    assert not listens("127.0.0.1", port)


def test_the_stats_of_a_fleet_are_sums_except_for_the_engines_that_its_gateways_share():
    part = GatewayStats(
        **{name: 1 for name, field in GatewayStats.model_fields.items() if field.annotation is int},
        **{
            name: {"a": 1, name: 2}
            for name, field in GatewayStats.model_fields.items()
            if field.annotation is not int
        },
    )
    total = GatewayStats.total([part, part, part]).model_dump()
    shared = {name: total.pop(name) for name in [*total] if name.startswith("engine_")}
    assert shared == {name: {"a": 1, name: 2} for name in shared}
    assert total == {
        name: 3 if isinstance(value, int) else {"a": 3, name: 6}
        for name, value in part.model_dump(exclude={*shared}).items()
    }


# --- pauses -----------------------------------------------------------------------------------------------


async def is_in_flight(fleet):
    return (await fleet.stats()).calls_in_flight == 1


async def calls_wait_while_engines_sleep_and_name_the_newest_version_of_their_adapter(fleet, engine, claims):
    engine.replies, before = lambda prompt: "hello", len(engine.requests)
    for shard in range(2):
        endpoint = fleet.endpoint(claims(session_of(shard, nth=1)).model_copy(update={"adapter": "math"}))
        await fleet.set_adapters({"math": 2 * shard + 1})
        await fleet.pause()
        asked = asyncio.create_task(complete(endpoint))
        await eventually(lambda: is_in_flight(fleet))
        assert len(engine.requests) == before + 3 * shard
        await fleet.resume()
        assert await asked == "hello"
        await fleet.set_adapters({"math": 2 * shard + 2})
        await complete(endpoint)
        await complete(fleet.endpoint(claims(session_of(shard, nth=2))))
        segments = (await fetch_trajectory(endpoint, 120)).segments
        spans = [span for segment in segments for turn in segment.turns for span in turn.weight_versions]
        assert {span.version for span in spans} == {f"math@{2 * shard + 1}", f"math@{2 * shard + 2}"}
    sent = [request.get("lora_path") for request in engine.requests[before:]]
    assert sent == ["math@1", "math@2", None, "math@3", "math@4", None]


async def a_call_in_flight_is_aborted_by_a_pause_and_repeated(fleet, engine, held, claims):
    engine.replies, before = held, len(engine.requests)
    call = asyncio.create_task(complete(fleet.endpoint(claims(session_of(0, nth=3)))))
    assert await asyncio.to_thread(held.asked.acquire, timeout=120)
    await fleet.pause()
    await eventually(lambda: engine.aborted > 0)
    assert not call.done()
    held.go.set()
    await fleet.resume()
    assert await call == "at last"
    assert len(engine.requests) == before + 2


@pytest.mark.slow
async def test_a_restarted_gateway_stays_paused_and_names_the_newest_version(start_fleet, claims):
    with ScriptedEngine(lambda prompt: "hello") as engine:
        fleet = await start_fleet(engine)
        await fleet.set_adapters({"math": 3})
        await fleet.pause()
        endpoint = fleet.endpoint(claims().model_copy(update={"adapter": "math"}))
        asked = asyncio.create_task(complete(endpoint, retries=12))
        await eventually(lambda: is_in_flight(fleet))
        os.kill(fleet._shards[0]._process.pid, signal.SIGKILL)
        await fleet._shards[0]._process.wait()
        await fleet.pause()  # returns after the restart
        assert engine.requests == []
        assert not asked.done()
        await fleet.resume()
        assert await asked == "hello"
        assert engine.requests[-1]["lora_path"] == "math@3"


class HungShard:
    """A gateway that accepts requests and answers none from some time of its first life on."""

    url = "http://gateway"
    journal_id = "journal"

    def __init__(self, answers_s: float) -> None:
        self.starts = 0
        self._answers_s = answers_s

    async def start(self) -> None:
        self.starts += 1

    async def stop(self) -> None: ...

    async def wait(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def resume(self) -> None:
        await self._healthy()

    async def _healthy(self) -> bool:
        if self.starts == 1 and asyncio.get_running_loop().time() >= self._answers_s:
            await asyncio.sleep(30)
            raise ServingError("the gateway does not answer")
        return True


@pytest.mark.parametrize("answers_s", [0, 60])
@in_virtual_time
async def test_a_hung_gateway_is_restarted_before_an_instruction_gives_up(tmp_path, monkeypatch, answers_s):
    shard, events = HungShard(answers_s), []

    async def make(_):
        return [shard]

    monkeypatch.setattr(GatewayFleet, "_make", make)
    fleet = GatewayFleet(run_config(), "http://router", tmp_path, journals=tmp_path, on_event=events.append)
    await fleet.start()
    await asyncio.sleep(answers_s)
    await fleet.resume()
    assert shard.starts == 2
    assert [event.kind for event in events] == ["died", "restarted"]
    await fleet.stop()


@in_virtual_time
async def test_an_instruction_that_a_gateway_never_answers_ends(tmp_path, monkeypatch):
    shard = HungShard(0)

    async def make(_):
        return [shard]

    monkeypatch.setattr(GatewayFleet, "_make", make)
    monkeypatch.setattr(shard, "resume", asyncio.Event().wait)
    fleet = GatewayFleet(run_config(), "http://router", tmp_path, journals=tmp_path)
    await fleet.start()
    with pytest.raises(ServingError, match="no answer in time"):
        await fleet.resume()
    await fleet.stop()
