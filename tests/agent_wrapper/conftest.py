"""Fixtures: S3 and SQS, a stub of the gateway, and containers."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.cloud import LocalStorage
from stub_server import StubServer
from wrapper_containers import Cloud, Container, Gateway, Signal


@pytest.fixture(scope="session")
def cloud(storage: LocalStorage) -> Iterator[Cloud]:
    cloud = Cloud(storage)
    yield cloud
    cloud.s3.close()
    cloud.sqs.close()


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    with StubServer(gateway.handle) as server:
        gateway.url = server.url
        yield gateway


@pytest.fixture(scope="session")
def start_container(cloud: Cloud, gateway: Gateway) -> Iterator[Callable[..., Container]]:
    with ExitStack() as stack:

        def start(kind: str, **env: str) -> Container:
            container = Container(cloud, gateway, kind, env)
            stack.callback(container.close)
            return container

        yield start


@pytest.fixture(scope="session")
def sync_container(start_container: Callable[..., Container]) -> Container:
    return start_container("sync")


@pytest.fixture(scope="session")
def async_container(start_container: Callable[..., Container]) -> Container:
    return start_container("async")


@pytest.fixture(params=["sync", "async"])
def container(request: pytest.FixtureRequest) -> Container:
    """A container of either kind, for tests that leave it running."""
    container: Container = request.getfixturevalue(f"{request.param}_container")
    return container


@pytest.fixture
def dead_url() -> str:
    """Return a URL without a server."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Return a named pipe: opening one end waits for the other."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def make_signal(tmp_path: Path) -> Callable[[], Signal]:
    numbers = itertools.count()
    return lambda: Signal(tmp_path / f"signal-{next(numbers)}")
