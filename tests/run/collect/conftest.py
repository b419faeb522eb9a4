"""Fixtures: a local S3 and SQS, and runs that receive from them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from builders import eventually
from collect_bench import Run, Sink, end
from rollout_backend.config import AwsConfig, QueueConfig, StorageConfig
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.run.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.testing.fault_proxy import FaultProxy
from rollout_backend.workbench.local.cloud import LocalStorage
from tests.emulators.ministack import MiniStack


@pytest.fixture(
    scope="session", params=["moto", pytest.param("MiniStack", marks=[pytest.mark.slow, pytest.mark.release])]
)
def storage(request, storage, tmp_path_factory) -> Iterator[LocalStorage]:
    """Each server in turn, for the whole session."""
    if request.param == "moto":
        yield storage
        return
    other = MiniStack(tmp_path_factory.mktemp("ministack"))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(other):
        yield other


@pytest.fixture
def where(local_aws: LocalStorage) -> AwsConfig:
    return AwsConfig(region=local_aws.region, endpoint_url=local_aws.endpoint_url)


@pytest.fixture
def nowhere(local_aws: LocalStorage) -> AwsConfig:
    """An endpoint without a server."""
    return AwsConfig(endpoint_url=f"http://127.0.0.1:{free_port()}")


@pytest.fixture
def faulty(proxy: FaultProxy, where: AwsConfig) -> AwsConfig:
    """The local storage behind `proxy`, which waits for its clients: a test names it before what it opens."""
    return AwsConfig(region=where.region, endpoint_url=proxy.url)


@pytest.fixture
async def s3(local_aws: LocalStorage) -> AsyncIterator[Any]:
    async with local_aws.s3() as client:
        yield client


@pytest.fixture
async def sqs(local_aws: LocalStorage) -> AsyncIterator[Any]:
    async with local_aws.client("sqs") as client:
        yield client


OpenStore = Callable[..., Awaitable[ResultStore]]
OpenQueue = Callable[..., Awaitable[AnnouncementQueue]]


@pytest.fixture
async def open_store(where: AwsConfig, local_aws: LocalStorage) -> AsyncIterator[OpenStore]:
    """Open the bucket. Keywords are settings of `storage`; `at` is another endpoint."""
    async with AsyncExitStack() as stack:

        async def open_(at: AwsConfig = where, **settings: Any) -> ResultStore:
            store = await ResultStore.open(StorageConfig(**{"bucket": local_aws.bucket, **settings}), at)
            stack.push_async_callback(store.aclose)
            return store

        yield open_


@pytest.fixture
def name(local_aws: LocalStorage, run_id: str) -> str:
    """The name of the run's queue."""
    return queue_name(StorageConfig(bucket=local_aws.bucket), run_id)


@pytest.fixture
async def open_queue(where: AwsConfig, name: str) -> AsyncIterator[OpenQueue]:
    """Open the run's queue. Keywords are settings of `queue`; a test that closes it passes `close=False`."""
    async with AsyncExitStack() as stack:

        async def open_(
            at: AwsConfig = where,
            kind: type[AnnouncementQueue] = AnnouncementQueue,
            close: bool = True,
            **settings: Any,
        ) -> AnnouncementQueue:
            queue = await kind.open(QueueConfig(**{"wait_s": 1, **settings}), at, name)
            if close:
                stack.push_async_callback(queue.aclose)
            return queue

        yield open_


@pytest.fixture
async def open_run(
    open_store: OpenStore, open_queue: OpenQueue, s3: Any, sqs: Any, run_id: str
) -> AsyncIterator[Callable[..., Awaitable[Run]]]:
    """Open a run whose buffer receives. Keywords are settings of `storage` and `queue` (False: no queue)."""
    async with AsyncExitStack() as stack:

        async def open_(
            *sinks: Sink,
            storage: dict[str, Any] | None = None,
            queue: dict[str, Any] | bool = True,
            receive: bool = True,
            run_id: str = run_id,
        ) -> Run:
            opened = await open_queue(**(queue if isinstance(queue, dict) else {})) if queue is not False else None
            run = Run(run_id, await open_store(**(storage or {})), opened, s3, sqs)
            for sink in sinks:
                run.buffer.attach(sink)
            if receive:
                receiving = asyncio.create_task(run.buffer.run(2))
                stack.push_async_callback(end, receiving)
            return run

        yield open_


@pytest.fixture
def until_logged(caplog: pytest.LogCaptureFixture) -> Callable[[str, int], Awaitable[None]]:
    """Wait until the log contains a text a number of times."""

    async def until_logged(words: str, times: int = 1) -> None:
        await eventually(lambda: caplog.text.count(words) >= times)

    return until_logged
