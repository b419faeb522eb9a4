"""End to end: real gateways, the dialer as the manager runs it, and a real SDK."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import openai
import pytest
from pydantic import SecretStr

from agent_wrapper.shared.trajectory import fetch_trajectory
from builders import complete, eventually, run_config
from rollout_backend.config import RelayConfig, RolloutConfig
from rollout_backend.core.session_key import shard_of
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet
from rollout_backend.serving.gateway_process import public_gateway_config
from rollout_backend.serving.model_serving import DialerProcess
from rollout_backend.serving.supervisor import OnEvent, RestartLimits, ServingEvent


def config(url: str, key: str, **sections) -> RolloutConfig:
    relay = {"url": url, "key": key, "startup_timeout_s": 120}
    return run_config(**{"gateway": {"processes": 2}, "relay": relay, **sections})


def dialer_to(
    relay: RelayConfig, urls: Sequence[str], log: Path, on_event: OnEvent = lambda event: None
) -> DialerProcess:
    return DialerProcess(relay, urls, log, RestartLimits(3, 3600.0), on_event)


@pytest.fixture
async def training_side(tmp_path: Path):
    """Start engine, two gateways and the dialer for a relay at `url`; `endpoint` returns the agents' endpoints."""
    async with AsyncExitStack() as stack:

        async def start(url: str, key: str, script, agents_url: str) -> tuple[GatewayFleet, ScriptedEngine]:
            settings = config(url, key, gateway={"processes": 2, "key_in_path": True})
            relay = settings.relay.model_copy(update={"public_url": agents_url})
            settings = settings.model_copy(update={"relay": relay})
            engine = stack.enter_context(ScriptedEngine(script))
            fleet = GatewayFleet(
                public_gateway_config(settings), engine.url, tmp_path / "logs", journals=tmp_path / "j"
            )
            stack.push_async_callback(fleet.stop)
            await fleet.start()
            dialer = dialer_to(relay, fleet.urls, tmp_path / "logs" / "relay.log")
            stack.push_async_callback(dialer.stop)
            await dialer.start()
            return fleet, engine

        yield start


ask_streamed = partial(complete, stream=True)


async def test_rollout_through_the_relay(start_relay, wire, training_side, held, key, claims):
    relay = await start_relay("--wait-s", 600)
    laid = await wire(relay.port)
    held.go.set()
    fleet, engine = await training_side(laid.url, key, held, relay.url)
    sessions = {shard_of(name, 2): name for name in ("session-0", "session-1", "session-2", "session-3")}
    assert set(sessions) == {0, 1}
    for shard, session in sessions.items():
        given = fleet.endpoint(claims(session))
        assert given.base_url == f"{relay.url}/s/{shard}/k/{given.api_key}/v1"
        assert await complete(given) == "at last"
        assert await ask_streamed(given, "And 5 + 2?") == "at last"
        trajectory = await fetch_trajectory(given, 120)
        assert sum(len(segment.turns) for segment in trajectory.segments) == 2
        with pytest.raises(openai.APIStatusError):
            await complete(given)  # sealed

    # A cut during a call, blocking and streaming.
    for number, how in enumerate((complete, ask_streamed)):
        held.go.clear()
        made = laid.connections
        call = asyncio.create_task(how(fleet.endpoint(claims(f"cut-{number}"))))
        await eventually(lambda number=number: len(engine.requests) > 4 + number)
        await laid.cut()
        await eventually(lambda made=made: laid.connections > made)
        held.go.set()
        assert await call == "at last"

    # A disconnected agent aborts its call at the engine.
    held.go.clear()
    call = asyncio.create_task(complete(fleet.endpoint(claims("gone"))))
    await eventually(lambda: len(engine.requests) > 6)
    call.cancel()
    await eventually(lambda: engine.aborted == 1)
    held.go.set()

    # Control paths are refused by the relay, wrong session keys by the gateway.
    stranger = fleet.endpoint(claims("session-0"))
    stranger = stranger.model_copy(update={"base_url": stranger.base_url.replace(stranger.api_key, "nothing")})
    with pytest.raises(openai.AuthenticationError):
        await complete(stranger)
    log = (Path(laid.url).name, *(path.read_text() for path in fleet._log_dir.glob("*.log")))
    assert all(fleet.endpoint(claims("cut-0")).api_key not in text and key not in text for text in log)


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
