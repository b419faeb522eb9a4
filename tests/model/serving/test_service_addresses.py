"""Engines behind a host name that resolves to all of them."""

import asyncio
import socket

import pytest
from pydantic import ValidationError

from builders import eventually, run_config
from rollout_backend.config import ServingConfig
from rollout_backend.errors import ConfigError
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.external_engine import ServiceAddresses


@pytest.fixture
def names(monkeypatch):
    """Addresses by name, None for a name that DNS does not answer for."""
    names: dict[str, list[str] | None] = {}

    async def look_up(self, host, port, **options):
        found = names.get(host)
        if found is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    return names


async def test_each_address_is_a_server_and_a_name_without_an_answer_keeps_its_last(names, caplog):
    names |= {"a": ["10.0.0.2", "10.0.0.1"], "b": ["fd00::1"]}
    addresses = ServiceAddresses(["http://a:30000/", "http://b:30001"])
    both = ["http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://[fd00::1]:30001"]
    assert await addresses.look_up() == both
    names["a"] = None
    assert await addresses.look_up() == await addresses.look_up() == both
    assert caplog.text.count("its last addresses are kept") == 1
    names |= {"a": ["10.0.0.2"], "b": ["fd00::1"]}
    assert await addresses.look_up() == both[1:]


@pytest.mark.slow
async def test_a_fleet_follows_a_service(names, make_config, start_engine, tmp_path):
    url, _ = await start_engine()
    port = url.rpartition(":")[2]
    names["sglang.models.svc"] = None
    config = make_config(
        serving={"kind": "external", "urls": [f"http://sglang.models.svc:{port}"], "follow_dns": True}
    )
    fleet = EngineFleet(config, tmp_path)
    fleet._factory._addresses.every_s = 0.05
    starting = asyncio.create_task(fleet.start())
    await eventually(lambda: fleet._factory._addresses._unresolved)
    names["sglang.models.svc"] = ["127.0.0.1"]
    await starting
    assert fleet.engine_urls == (url,)
    failing = asyncio.create_task(fleet.failed())
    names["sglang.models.svc"] = ["127.0.0.1", "127.0.0.9"]
    await eventually(lambda: len(fleet.snapshot()) == 3)
    names["sglang.models.svc"] = ["127.0.0.9"]
    await eventually(lambda: [each.url for each in fleet.snapshot()][1:] == [f"http://127.0.0.9:{port}"])
    failing.cancel()
    await asyncio.wait([failing])
    await fleet.stop()


def test_settings_that_cannot_be_followed_are_refused():
    for urls in ([], ["https://sglang.models.svc"]):
        with pytest.raises(ValidationError, match="follow_dns needs urls"):
            ServingConfig(kind="external" if urls else "process", urls=urls, follow_dns=True)


async def test_a_list_that_the_run_follows_is_not_replaced():
    serving = {"kind": "external", "urls": ["http://sglang.models.svc:1"], "follow_dns": True}
    with pytest.raises(ConfigError, match="remove it to call follow_engines"):
        await RolloutManager(run_config(serving=serving)).follow_engines([])
