"""Every server that this package starts is reached over IPv4, IPv6 and all addresses, at the URL that it names."""

import itertools
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

import rollout_backend
from builders import run_config
from relays import KEY
from rollout_backend.base.addresses import ListenAddress, check_listen_address, host_port, is_loopback, local_address
from rollout_backend.base.local_keys import proxy_bypass
from rollout_backend.config import GatewayConfig, ObserveConfig, RouterConfig
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.relay.relay_server import serving
from rollout_backend.model.relay.relay_settings import RelaySettings
from rollout_backend.model.serving import gateway_process, local_engine
from rollout_backend.model.serving.gateway_process import (
    GatewayProcess,
    own_address,
    public_gateway_config,
    public_url,
)
from rollout_backend.model.serving.local_engine import LocalEngine
from rollout_backend.model.serving.router import EngineDirectory, Router
from rollout_backend.model.serving.server_process import free_port, require_port
from rollout_backend.run.accounts.metrics import RunMetrics, serve_metrics
from rollout_backend.views.page.report import ReportServer, serve_report
from rollout_backend.workbench.local.scripted import ScriptedEngine

HOSTS = ("127.0.0.1", "0.0.0.0", "::1", "::")
REACHED = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}


@asynccontextmanager
async def router(host: str, folder: Path) -> AsyncIterator[str]:
    async with Router(RouterConfig(host=host, kind="smg"), folder / "router.log") as running:
        yield f"{running.url}/liveness"


@asynccontextmanager
async def old_router(host: str, folder: Path) -> AsyncIterator[str]:
    async with Router(RouterConfig(host=host), folder / "router.log") as running:
        yield f"{running.url}/liveness"


@asynccontextmanager
async def directory(host: str, folder: Path) -> AsyncIterator[str]:
    running = EngineDirectory(RouterConfig(host=host))
    await running.start()
    try:
        yield f"{running.url}/workers"
    finally:
        await running.stop()


@asynccontextmanager
async def gateway(host: str, folder: Path) -> AsyncIterator[str]:
    config = run_config(gateway={"host": host})
    more = {"seal_secret": None, "shard": 0, "journal": folder / "journal", "trainer_incarnation": "1"}
    with ScriptedEngine([]) as engine:
        running = GatewayProcess(config, engine.url, folder / "gateway.log", "secret" * 8, **more)
        try:
            await running.start()
            yield f"{public_url(config.gateway, 0, running.url)}/health"
        finally:
            await running.stop()


@asynccontextmanager
async def relay(host: str, folder: Path) -> AsyncIterator[str]:
    port = free_port(host)
    async with serving(RelaySettings(key=KEY, host=host, port=port)) as served:
        assert served == port
        yield f"http://{host_port(local_address(host), port)}/health"


@asynccontextmanager
async def metrics(host: str, folder: Path) -> AsyncIterator[str]:
    async def refresh() -> None: ...

    config = run_config()
    async with serve_metrics(ObserveConfig(metrics_host=host, metrics_port=0), RunMetrics(config), refresh) as url:
        yield url


@asynccontextmanager
async def report(host: str, folder: Path) -> AsyncIterator[str]:
    async with serve_report(ReportServer(folder), host, 0) as url:
        yield f"{url}version"


STARTED = [
    # A gateway takes a second of CPU to start, and others start it at addresses of IPv4: see test_gateway_fleet.py.
    pytest.param(server, host, marks=pytest.mark.slow if server is gateway and ":" not in host else ())
    for server, host in itertools.product((router, old_router, directory, gateway, relay, metrics, report), HOSTS)
]


@pytest.mark.parametrize(("server", "host"), STARTED)
async def test_a_server_is_reached_at_every_address_that_it_listens_on(server, host, tmp_path):
    async with server(host, tmp_path) as url, aiohttp.ClientSession() as http:
        port = urlsplit(url).port
        for address in REACHED.get(host, (host,)):
            target = urlsplit(url)._replace(netloc=host_port(address, port)).geturl()
            async with http.get(target) as response:
                assert response.status < 600
        with pytest.raises(StartupError, match=re.escape(f"on {host_port(host, port)} (")):
            require_port(host, port, "another", "its.port")


async def test_engines_and_their_nodes_have_urls_of_ipv6(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(local_engine, "is_healthy", healthy := Healthy())
    config = run_config(model={"path": model_folder})
    engine = LocalEngine(
        *("engine", config.model, config.serving, tmp_path / "log"),
        host="::1",
        command=lambda *_: (["sleep", "60"], {}),
    )
    assert re.fullmatch(r"\[::1\]:\d+", await engine.rendezvous())
    try:
        await engine.start()
    finally:
        await engine.stop()
    assert healthy.asked == [engine.url]
    assert urlsplit(engine.url).hostname == "::1"


class Healthy:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, url: str) -> bool:
        self.asked.append(url)
        return True


class OnlyIPv6(socket.socket):
    """A machine without a route for IPv4."""

    def connect(self, address):
        if self.family == socket.AF_INET:
            raise OSError(101, "Network is unreachable")

    def getsockname(self):
        return ("2001:db8::7", 9, 0, 0)


@pytest.mark.parametrize("template", ["auto", "http://{host}:{port}"])
def test_agents_of_a_machine_without_ipv4_call_its_ipv6_address(template, monkeypatch):
    config = run_config(gateway={"public_url": template, "port": 8000})
    monkeypatch.setattr(gateway_process.socket, "socket", OnlyIPv6)
    assert own_address() == "2001:db8::7"
    gateway = public_gateway_config(config).gateway
    assert gateway.host == "::"
    assert public_url(gateway, 0, "http://[::1]:8000") == "http://[2001:db8::7]:8000"
    assert public_url(gateway, 0, "http://[2001:db8::9]:8000") == "http://[2001:db8::9]:8000"


def test_a_machine_without_a_network_is_its_own_address(monkeypatch):
    class Offline(OnlyIPv6):
        def connect(self, address):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(gateway_process.socket, "socket", Offline)
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "host"),
    [("[::1]", "::1"), ("0:0:0:0:0:0:0:0", "::"), ("2001:DB8::0:7", "2001:db8::7"), ("trainer-0.local", None)],
)
def test_an_address_is_written_in_one_way(given, host):
    assert check_listen_address(given) == (host or given)


@pytest.mark.parametrize("host", ["", "::1:8000:x", "0.0.0.0:8000", "http://::", "[::1]:80", "fe80::1%eth0"])
@pytest.mark.parametrize("setting", ["gateway.host", "router.host", "observe.metrics_host"])
def test_what_is_no_address_is_refused_by_name(setting, host):
    section, name = setting.split(".")
    with pytest.raises(ConfigError, match=f"{section}.{name}.*(is not an address|link-local)"):
        run_config(**{section: {name: host}})


def test_all_addresses_of_servers_are_checked():
    sections = (GatewayConfig, RouterConfig, ObserveConfig, RelaySettings)
    named = {(each, name) for each in sections for name in each.model_fields if name.endswith("host")}
    checked = [each.model_fields[name].metadata == list(ListenAddress.__metadata__) for each, name in named]
    assert checked == [True] * len(sections)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.2", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("::", False),
    ],
)
def test_loopback_addresses(host, loopback):
    assert is_loopback(host) == loopback


def test_this_machine_is_reached_without_a_proxy_over_ipv6_too():
    assert {"127.0.0.1", "::1", "localhost"} <= set(proxy_bypass()["no_proxy"].split(","))


def test_one_function_writes_a_host_with_its_port():
    """`{host}:{port}` would be wrong for IPv6."""
    written = re.compile(r"\{[^{}]*(?:host|address|HOST|ip)(?:\([^{}]*\))?\}:\{[^{}]*port")
    folder = Path(rollout_backend.__file__).parent
    found = [
        (file.name, line.strip())
        for file in folder.rglob("*.py")
        if "demo" not in file.relative_to(folder).parts and file.name != "addresses.py"
        for line in file.read_text().splitlines()
        if written.search(line.replace("http://{host}:{port}", "a template of settings"))
    ]
    assert found == []
