import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from builders import run_config
from rollout_backend.config import RolloutConfig
from rollout_backend.model.serving.engine import is_healthy
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.gateway_process import public_gateway_config
from rollout_backend.model.serving.local_engine import Command, LocalEngine, ServerNode
from rollout_backend.model.serving.model_serving import ModelServing
from rollout_backend.model.serving.server_process import ServerProcess, free_port

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


def fake_argv(host: str, port: int, mode: str = "healthy") -> list[str]:
    return [sys.executable, "-S", str(FAKE_ENGINE), host, str(port), mode]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def make_config(model_folder: Path) -> Callable[..., RolloutConfig]:
    """Return settings with some sections replaced: make_config(serving={"servers": 2}).

    The router is the one that starts faster, by half a second of CPU.
    """
    fixed = {"model": {"path": model_folder}, "router": {"kind": "smg"}}
    return lambda **sections: run_config(**{**fixed, **sections})


@pytest.fixture
def fake_engines(tmp_path: Path) -> Callable[..., list[LocalEngine]]:
    """Let a fleet make fake engines, which log to one file; return the list of those that it has made.

    `modes[i]` is the mode of the i-th engine that the fleet makes, and `then` that of all later ones. A restart makes
    an engine.
    """

    def replace(fleet: EngineFleet, config: RolloutConfig, *modes: str, then: str = "healthy") -> list[LocalEngine]:
        engines, left = [], itertools.chain(modes, itertools.repeat(then))

        def make(i: int) -> LocalEngine:
            # Not when it starts: a thread looks for its weights first, so engines start in any order.
            log, mode = tmp_path / "engines.log", next(left)

            def command(model: object, serving: object, node: ServerNode) -> Command:
                return fake_argv(node.host, node.port, mode), {}

            engines.append(LocalEngine(f"engine-{i}", config.model, config.serving, log, command=command))
            return engines[-1]

        fleet._factory.make = make
        return engines

    return replace


@pytest.fixture
def serve(config: RolloutConfig, fake_engines: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Serve the `config` of the test's module with fake engines of these modes, see `fake_engines`."""

    @asynccontextmanager
    async def run(*modes: str) -> AsyncIterator[tuple[ModelServing, list[Any], list[LocalEngine]]]:
        events: list[Any] = []
        serving = ModelServing(config, tmp_path, events.append)
        engines = fake_engines(serving.engines, config, *modes)
        async with serving.engines:
            yield serving, events, engines

    return run


@pytest.fixture
async def start_engine(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[str, ServerProcess]]]]:
    """Start a fake engine; return its URL and process."""
    processes: list[ServerProcess] = []

    async def start(port: int = 0) -> tuple[str, ServerProcess]:
        port = port or free_port()
        process = ServerProcess("fake", fake_argv("127.0.0.1", port), tmp_path / f"fake-{port}.log")
        processes.append(process)
        await process.start()
        url = f"http://127.0.0.1:{port}"
        await process.wait_healthy(lambda: is_healthy(url), 120)
        return url, process

    yield start
    for process in processes:
        await process.stop()


@pytest.fixture
async def start_fleet(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[GatewayFleet]]]:
    """Start gateways before a scripted engine; `sections` are settings, all else are the fleet's arguments."""
    async with AsyncExitStack() as stack:

        async def start(engine, log_dir: Path = tmp_path, secret: str | None = None, *, more=None, **sections):
            more = {"journals": log_dir / "journals", **(more or {})}
            config = public_gateway_config(run_config(**sections))  # as a run does
            fleet = GatewayFleet(config, engine.url, log_dir, secret, **more)
            stack.push_async_callback(fleet.stop)
            await fleet.start()
            return fleet

        yield start
