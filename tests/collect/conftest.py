"""Fixtures: a local S3 and SQS, and a result sink that records what the buffer delivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agent_wrapper.contract import Announcement, ContractError, Rollout, result_key
from rollout_backend import aws
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import AwsConfig, QueueConfig, StorageConfig
from rollout_backend.local.cloud import LocalStorage
from rollout_backend.local.fault_proxy import FaultProxy, Rule
from rollout_backend.serving.server_process import free_port


@pytest.fixture
def where(local_aws: LocalStorage) -> AwsConfig:
    return AwsConfig(region=local_aws.region, endpoint_url=local_aws.endpoint_url)


@pytest.fixture
def nowhere(local_aws: LocalStorage) -> AwsConfig:
    """An endpoint without a server."""
    return AwsConfig(endpoint_url=f"http://127.0.0.1:{free_port()}")


@pytest.fixture
async def faulty(local_aws: LocalStorage) -> AsyncIterator[Callable[..., Awaitable[tuple[AwsConfig, FaultProxy]]]]:
    """Open a proxy with fault rules in front of the local storage; returns its address and the proxy."""
    async with AsyncExitStack() as stack:

        async def open_(*rules: Rule) -> tuple[AwsConfig, FaultProxy]:
            proxy = await stack.enter_async_context(FaultProxy(local_aws.endpoint_url, rules, seed=3))
            return AwsConfig(region=local_aws.region, endpoint_url=proxy.url), proxy

        yield open_


@pytest.fixture
async def s3(where: AwsConfig) -> AsyncIterator[Any]:
    async with aws.client("s3", region=where.region, endpoint_url=where.endpoint_url) as client:
        yield client


@pytest.fixture
async def sqs(where: AwsConfig) -> AsyncIterator[Any]:
    async with aws.client("sqs", region=where.region, endpoint_url=where.endpoint_url) as client:
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


class Sink:
    """A step that records what the buffer delivers.

    It wants the given rollouts until they arrive, and failure markers of its current attempt.
    """

    def __init__(self, *wanted: str, step: int = 0, attempt: int = 1) -> None:
        self.attempt = attempt
        self.step = step
        self.wanted = set(wanted)
        self.arrived: list[tuple[Rollout, float | None]] = []
        self.rejected: dict[str, ContractError] = {}
        self.repeated: list[str] = []
        self._changed = asyncio.Event()

    def is_wanted(self, rollout_id: str, attempt: int | None = None) -> bool:
        return rollout_id in self.wanted and attempt in (None, self.attempt)

    def session_id(self, rollout_id: str, attempt: int) -> str:
        return f"session-{rollout_id}"

    def pending(self) -> list[tuple[str, int]]:
        return [(rollout_id, self.attempt) for rollout_id in sorted(self.wanted)]

    def record_duplicate(self, rollout_id: str) -> None:
        self.repeated.append(rollout_id)
        self._changed.set()

    def on_result(self, rollout: Rollout, announced_at: float | None, failure_marker: bool = False) -> None:
        self.wanted.discard(rollout.rollout_id)
        self.arrived.append((rollout, announced_at))
        self._changed.set()

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        self.wanted.discard(rollout_id)
        self.rejected[rollout_id] = error
        self._changed.set()

    @property
    def ids(self) -> list[str]:
        return sorted(rollout.rollout_id for rollout, _ in self.arrived)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. It is checked after each call of the buffer."""
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Run:
    """One run's store, queue and buffer, and what agents do: write and announce results."""

    def __init__(self, run_id: str, store: ResultStore, queue: AnnouncementQueue | None, s3: Any, sqs: Any) -> None:
        self.run_id = run_id
        self.store = store
        self.queue = queue
        self.buffer = RolloutBuffer(run_id, store, queue, max_fetches=4)
        self._s3 = s3
        self._sqs = sqs

    def key(self, rollout_id: str, step: int = 0) -> str:
        return result_key(self.store.config.prefix, self.run_id, step, rollout_id)

    async def put(self, key: str, body: bytes) -> str:
        await self._s3.put_object(Bucket=self.store.config.bucket, Key=key, Body=body)
        return key

    async def store_(self, *rollouts: Rollout) -> None:
        for rollout in rollouts:
            await self.put(self.key(rollout.rollout_id, rollout.step), rollout.encode())

    async def announce(self, *keys: str, bucket: str | None = None) -> None:
        """Send one message that names all keys."""
        named = [Announcement(bucket=bucket or self.store.config.bucket, key=key).encode() for key in keys]
        records = [record for body in named for record in json.loads(body)["Records"]]
        await self.send(json.dumps({"Records": records}))

    async def send(self, body: str) -> None:
        assert self.queue is not None
        await self._sqs.send_message(QueueUrl=self.queue.url, MessageBody=body)

    async def held(self) -> int:
        """Return the number of messages in the queue, including hidden ones."""
        assert self.queue is not None
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        reply = await self._sqs.get_queue_attributes(QueueUrl=self.queue.url, AttributeNames=names)
        return sum(int(reply["Attributes"][name]) for name in names)

    async def until_held(self, count: int) -> None:
        async with asyncio.timeout(30):
            while await self.held() != count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def quarantined(self) -> list[dict[str, Any]]:
        prefix = f"{self.store.config.prefix}runs/{self.run_id}/quarantine/"
        return [json.loads(await self.store.get(key)) async for key in self.store.keys(prefix)]


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
                stack.push_async_callback(_end, receiving)
            return run

        yield open_


async def _end(task: asyncio.Task[None]) -> None:
    assert not task.done(), "receiving ended before it was cancelled"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def make_sink() -> type[Sink]:
    return Sink


@pytest.fixture
def receive_with() -> Callable[..., AbstractAsyncContextManager[RolloutBuffer]]:
    """Receive a run's messages with another store."""

    @asynccontextmanager
    async def receive_with(run: Run, store: ResultStore, sink: Sink, **more: Any) -> AsyncIterator[RolloutBuffer]:
        buffer = RolloutBuffer(run.run_id, store, run.queue, max_fetches=4, **more)
        buffer.attach(sink)
        receiving = asyncio.create_task(buffer.run(1))
        yield buffer
        await _end(receiving)

    return receive_with


@pytest.fixture
def until_logged(caplog: pytest.LogCaptureFixture) -> Callable[[str, int], Awaitable[None]]:
    """Wait until the log contains a text a number of times."""

    async def until_logged(words: str, times: int) -> None:
        async with asyncio.timeout(30):
            while caplog.text.count(words) < times:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    return until_logged
