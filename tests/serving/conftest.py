from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rollout_backend.config import RolloutConfig
from rollout_backend.serving.engine import is_healthy
from rollout_backend.serving.server_process import ServerProcess, free_port
from rollout_backend.serving.sglang import Command

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
    """Return settings with some sections replaced: make_config(serving={"servers": 2})."""

    def make(**sections: object) -> RolloutConfig:
        base = {
            "model": {"path": model_folder},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
        }
        return RolloutConfig.parse({**base, **sections})

    return make


@pytest.fixture
def fake_command() -> Callable[..., Callable[..., Command]]:
    """Make a `MakeCommand` of fake engines; `mode` gets the number of earlier starts."""

    def make(mode: Callable[[int], str] = lambda started: "healthy") -> Callable[..., Command]:
        started = 0

        def command(model: object, serving: object, host: str, port: int, first_gpu: int) -> Command:
            nonlocal started
            started += 1
            return fake_argv(host, port, mode(started - 1)), {}

        return command

    return make


@pytest.fixture
async def start_engine(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[str, ServerProcess]]]]:
    """Start a fake engine; return its URL and process."""
    processes: list[ServerProcess] = []

    async def start() -> tuple[str, ServerProcess]:
        port = free_port()
        process = ServerProcess("fake", fake_argv("127.0.0.1", port), tmp_path / f"fake-{port}.log")
        processes.append(process)
        await process.start()
        url = f"http://127.0.0.1:{port}"
        await process.wait_healthy(lambda: is_healthy(url), 20)
        return url, process

    yield start
    for process in processes:
        await process.stop()


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Wait for a condition, up to `timeout_s`."""

    async def wait(condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not become true"
            await asyncio.sleep(0.02)

    return wait
