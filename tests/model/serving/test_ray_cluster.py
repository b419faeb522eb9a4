"""Engines on Ray's test cluster of three machines with an address and one logical GPU each; SGLang is a fake."""

import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from builders import eventually, kinds
from ray_cluster import REMOVABLE, machine, ray_machines
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.ray_servers import RayEngineFactory
from tests.model.serving.conftest import FAKE_ENGINE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESOURCES = {"num_cpus": 2, "num_gpus": 1}


@pytest.fixture
def machines():
    with ray_machines(RESOURCES, [RESOURCES] * 2) as machines:
        yield machines


@pytest.fixture
def command():
    """A command that Ray's workers get by value, because they cannot import this module."""
    python, script = sys.executable, str(FAKE_ENGINE)

    def make(model, serving, node):
        words = ["healthy", f"{node.rank}/{serving.nodes_per_server}@{node.rendezvous}"]
        return [python, "-S", script, node.host, str(node.port), *words], {}

    return make


@pytest.fixture
def make_fleet(make_config, command, tmp_path):
    def make(events, **serving):
        config = make_config(serving={"kind": "ray", "startup_timeout_s": 120, **serving})
        return EngineFleet(config, tmp_path, events.append, factory=RayEngineFactory(config, tmp_path, command))

    return make


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def url_of(fleet, server: str) -> str:
    return next(each.url for each in fleet.snapshot() if each.name == server)


async def test_engines_of_a_lost_machine_restart_elsewhere_or_when_it_returns(machines, make_fleet):
    events = []
    async with make_fleet(events, servers=2) as fleet:
        assert len({machine(url) for url in fleet.engine_urls}) == 2
        server = next(name for name in ("engine-0", "engine-1") if machine(url_of(fleet, name)) in REMOVABLE)
        other = {"engine-0": "engine-1", "engine-1": "engine-0"}[server]
        first = machine(url_of(fleet, server))
        await machines.lose(first)
        await eventually(lambda: kinds(events, server) == ["started", "died", "restarted"], 120)
        assert machine(url_of(fleet, server)) not in {first, machine(url_of(fleet, other))}
        assert kinds(events, other) == ["started"]
        assert len(fleet.engine_urls) == 2

        lost = next(name for name in (server, other) if machine(url_of(fleet, name)) in REMOVABLE)
        kept = {server: other, other: server}[lost]
        before = len(kinds(events, kept))
        await machines.lose(machine(url_of(fleet, lost)))
        await eventually(lambda: kinds(events, lost)[-1] == "waiting", 120)
        waits = next(event for event in reversed(events) if event.kind == "waiting")
        assert waits.detail.startswith("waits for 1 GPU on one machine; free are ")
        assert [each.waiting_for for each in fleet.snapshot() if each.name == lost] == [waits.detail]
        machines.add("127.0.0.4", **RESOURCES)
        await eventually(lambda: kinds(events, lost)[-1] == "restarted", 120)
        assert machine(url_of(fleet, lost)) == "127.0.0.4"
        assert len(kinds(events, kept)) == before


async def test_a_server_on_two_machines_restarts_as_one(machines, make_fleet, tmp_path):
    events = []
    async with make_fleet(events, tensor_parallel=2, nodes_per_server=2) as fleet:
        [url] = fleet.engine_urls
        engine = fleet._engines[0].server
        addresses = [await node.read("url") for node in engine._nodes]
        assert addresses[0] == url
        assert len({machine(each) for each in addresses}) == 2
        pid = await engine._nodes[1].read("pid")
        assert f"1/2@{machine(url)}:" in command_line(pid)
        async with aiohttp.ClientSession() as http, http.post(f"{fleet.router_url}/generate", json={}) as reply:
            served_by = (await reply.json())["pid"]
        assert served_by == await engine._nodes[0].read("pid")

        os.kill(pid, signal.SIGKILL)  # of the node that answers no request
        await eventually(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"], 120)
        assert "engine-0.node-1.log" in next(event.detail for event in events if event.kind == "died")
        with pytest.raises(ProcessLookupError):
            os.kill(served_by, 0)

        engine = fleet._engines[0].server
        addresses = [machine(await node.read("url")) for node in engine._nodes]
        await machines.lose(next(each for each in addresses if each in REMOVABLE))
        await eventually(lambda: kinds(events, "engine-0").count("restarted") == 2, 120)
        [url] = fleet.engine_urls
        async with aiohttp.ClientSession() as http, http.post(f"{fleet.router_url}/generate", json={}) as reply:
            assert reply.status == 200


async def test_a_run_begins_with_the_engines_that_find_a_machine(machines, make_fleet):
    events = []
    async with make_fleet(events, servers=4) as fleet:
        assert len(fleet.engine_urls) == 3
        [late] = [each.name for each in fleet.snapshot() if each.waiting_for]
        machines.add("127.0.0.4", **RESOURCES)
        await eventually(lambda: kinds(events, late) == ["waiting", "started"], 120)
        assert len(fleet.engine_urls) == 4
    async with make_fleet(events, servers="auto", tensor_parallel=2, nodes_per_server=2) as fleet:
        assert len(fleet.engine_urls) == 2
