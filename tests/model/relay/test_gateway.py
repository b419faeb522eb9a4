"""End to end: real gateways, the dialer as the manager runs it, and a real SDK."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import openai
import pytest
from pydantic import SecretStr

from agent_wrapper.shared.trajectory import fetch_trajectory
from builders import complete, report, run_config, session_of
from rollout_backend.config import RelayConfig, RolloutConfig
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.gateway_process import public_gateway_config
from rollout_backend.model.serving.model_serving import DialerProcess
from rollout_backend.model.serving.supervisor import OnEvent, RestartLimits, ServingEvent
from rollout_backend.workbench.local.scripted import ScriptedEngine


def config(url: str, key: str, **sections) -> RolloutConfig:
    relay = {"url": url, "key": key, "startup_timeout_s": 120}
    return run_config(**{"gateway": {"processes": 2}, "relay": relay, **sections})


def dialer_to(
    relay: RelayConfig, urls: Sequence[str], log: Path, on_event: OnEvent = lambda event: None
) -> DialerProcess:
    return DialerProcess(relay, urls, log, RestartLimits(3, 3600.0), on_event)


async def test_rollout_through_the_relay(start_relay, key, claims, tmp_path):
    relay, logs = await start_relay("--wait-s", 600), tmp_path / "logs"
    settings = config(relay.url.replace("http", "ws"), key, gateway={"processes": 2, "key_in_path": True})
    settings = settings.model_copy(update={"relay": settings.relay.model_copy(update={"public_url": relay.url})})
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(lambda _: "at last"))
        fleet = GatewayFleet(public_gateway_config(settings), engine.url, logs, journals=tmp_path / "j")
        stack.push_async_callback(fleet.stop)
        await fleet.start()
        dialer = dialer_to(settings.relay, fleet.urls, logs / "relay.log")
        stack.push_async_callback(dialer.stop)
        await dialer.start()
        for shard in (0, 1):
            given = fleet.endpoint(claims(session_of(shard)))
            assert given.base_url == f"{relay.url}/s/{shard}/k/{given.api_key}/v1"
            assert await complete(given) == "at last"
            assert await complete(given, "And 5 + 2?", stream=True) == "at last"
            assert await report(given, "complete-rollout") == 200
            assert await report(given, "update-reward", Rewards=[1.0]) == 200
            assert (await fleet.report_of(session_of(shard)))["rewards"] == [1.0]
            trajectory = await fetch_trajectory(given, 120)
            assert sum(len(segment.turns) for segment in trajectory.segments) == 2
            with pytest.raises(openai.APIStatusError):
                await complete(given)  # sealed
            stranger = given.model_copy(update={"base_url": given.base_url.replace(given.api_key, "nothing")})
            with pytest.raises(openai.AuthenticationError):
                await complete(stranger)
            written = [path.read_text() for path in logs.glob("*.log")]
            assert all(given.api_key not in text and key not in text for text in written)


async def test_wrong_key_stops_the_run_at_start(host_relay, key, tmp_path):
    relay = await host_relay(key="another-key-" * 4)
    settings = RelayConfig(url=relay.url.replace("http", "ws"), key=SecretStr(key), startup_timeout_s=120)
    dialer = dialer_to(settings, ["http://127.0.0.1:9"], tmp_path / "dialer.log")
    with pytest.raises(StartupError, match=r"relay\.key here and ROLLOUT__RELAY__KEY there must be the same"):
        await dialer.start()
    assert key not in (tmp_path / "dialer.log").read_text()


async def test_a_dialer_that_another_one_replaces_is_not_restarted(host_relay, key, tmp_path):
    relay = await host_relay()
    settings = RelayConfig(url=relay.url.replace("http", "ws"), key=SecretStr(key), startup_timeout_s=120)
    events: list[ServingEvent] = []
    first, second = (
        dialer_to(settings, ["http://127.0.0.1:9"], tmp_path / f"{i}.log", events.append) for i in range(2)
    )
    try:
        await first.start()
        await second.start()
        with pytest.raises(StartupError, match="another training side with the same key has taken over"):
            await first.run()
        assert [event.kind for event in events] == ["died", "gave_up"]
    finally:
        await first.stop()
        await second.stop()


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "agents"),
    [
        ({"url": "wss://relay.example.com"}, "https://relay.example.com"),
        ({"url": "wss://relay.example.com/under/"}, "https://relay.example.com/under"),
        ({"url": "ws://relay:8080"}, "http://relay:8080"),
        (
            {"url": "wss://relay.example.com", "public_url": "http://relay.agents.svc:8080/"},
            "http://relay.agents.svc:8080",
        ),
    ],
)
def test_endpoints_point_to_the_relay(section, agents, key):
    auto = {"processes": 2, "public_url": "auto"}
    settings = config("wss://x", key, gateway=auto, relay={**section, "key": key})
    assert settings.relay.agents_url == agents
    assert public_gateway_config(settings).gateway.public_url == f"{agents}/s/{{shard}}"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"relay": {"url": "https://relay", "key": "k" * 32}}, r"relay\.url"),
        ({"relay": {"url": "wss://relay", "key": "short"}}, r"relay\.key"),
        ({"relay": {"url": "wss://relay"}}, r"relay\.key: is missing"),
        ({"gateway": {"public_url": "https://gateway"}}, "leave out gateway.public_url"),
    ],
)
def test_invalid_settings_are_refused(sections, message, key):
    with pytest.raises(ConfigError, match=message):
        config("wss://x", key, **sections)
