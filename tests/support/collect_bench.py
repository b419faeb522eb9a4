"""A run's store, queue and buffer, and a step that records what the buffer delivers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from agent_wrapper.contract import Announcement, ContractError, Rollout, result_key
from builders import eventually
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.queue import AnnouncementQueue
from rollout_backend.run.collect.store import ResultStore
from rollouts import make_rollout


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

    def on_result(
        self,
        rollout: Rollout,
        data: bytes,
        announced_at: float | None,
        failure_marker: bool = False,
        fetch_s: float = 0.0,
    ) -> None:
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
        async with asyncio.timeout(120):
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

    def rollout(self, rollout_id: str = "task-a.0", *args: Any, **more: Any) -> Rollout:
        """Make a result of this run."""
        return make_rollout(rollout_id, *args, **{"run_id": self.run_id, **more})

    def key(self, rollout_id: str = "task-a.0", step: int = 0) -> str:
        return result_key(self.store.config.prefix, self.run_id, step, rollout_id)

    async def put(self, key: str, body: bytes) -> str:
        await self._s3.put_object(Bucket=self.store.config.bucket, Key=key, Body=body)
        return key

    async def store_(self, *rollouts: Rollout) -> None:
        for rollout in rollouts:
            await self.put(self.key(rollout.rollout_id, rollout.step), rollout.encode())

    async def publish(self, *rollouts: Rollout) -> None:
        """Write results and announce each of them."""
        await self.store_(*rollouts)
        for rollout in rollouts:
            await self.announce(self.key(rollout.rollout_id, rollout.step))

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
        async def reached() -> bool:
            return await self.held() == count

        await eventually(reached)

    async def quarantined(self) -> list[dict[str, Any]]:
        prefix = f"{self.store.config.prefix}runs/{self.run_id}/quarantine/"
        return [json.loads(await self.store.get(key)) async for key in self.store.keys(prefix)]

    @asynccontextmanager
    async def receive_with(self, store: ResultStore, sink: Sink, **more: Any) -> AsyncIterator[RolloutBuffer]:
        """Receive the run's messages with another store."""
        buffer = RolloutBuffer(self.run_id, store, self.queue, max_fetches=4, **more)
        buffer.attach(sink)
        receiving = asyncio.create_task(buffer.run(1))
        yield buffer
        await end(receiving)


async def end(task: asyncio.Task[None]) -> None:
    assert not task.done(), "receiving ended before it was cancelled"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
