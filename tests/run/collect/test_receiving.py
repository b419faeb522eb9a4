"""How many receive and delete calls a buffer makes, in virtual time."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from agent_wrapper.contract import Announcement, result_key
from rollout_backend.config import StorageConfig
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.queue import Message, MessageDeleter
from tests.simulation.clock import in_virtual_time


class Queue:
    """A queue of this run alone, whose calls take 10 ms."""

    visibility_s = 30.0
    is_shared = False

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.sent = asyncio.Event()
        self.receiving = self.most_receiving = 0
        self.deleted: list[int] = []  # messages in each call

    def send(self, count: int) -> None:
        body = Announcement(bucket="results", key=result_key("", "run", 0, "task-a.0")).encode()
        self.messages.extend(Message(body, "receipt", f"message {i}", sent_at=0) for i in range(count))
        self.sent.set()

    async def receive(self) -> list[Message]:
        self.receiving += 1
        self.most_receiving = max(self.most_receiving, self.receiving)
        try:
            while not self.messages:
                self.sent.clear()
                await self.sent.wait()
            taken = [self.messages.popleft() for _ in range(min(10, len(self.messages)))]
            await asyncio.sleep(0.01)
            return taken
        finally:
            self.receiving -= 1

    async def delete(self, messages) -> None:
        if messages:
            await asyncio.sleep(0.01)
            self.deleted.append(len(messages))

    async def release(self, messages) -> None: ...

    async def extend_visibility(self, messages) -> None: ...


def buffer_of(queue: Queue) -> RolloutBuffer:
    """A buffer without steps: every message is stale, and done."""
    return RolloutBuffer("run", SimpleNamespace(config=StorageConfig(bucket="results")), queue, max_fetches=64)


async def receive_with(buffer: RolloutBuffer):
    receiving = asyncio.create_task(buffer.run(2))
    await asyncio.sleep(1)
    return receiving


@in_virtual_time
async def test_a_backlog_is_received_in_parallel_and_single_messages_by_the_configured_receivers():
    queue = Queue()
    buffer = buffer_of(queue)
    receiving = await receive_with(buffer)
    assert queue.receiving == 2
    queue.send(1000)
    await asyncio.sleep(0.2)
    assert buffer.stale == 1000
    assert 6 < queue.most_receiving <= 16
    for _ in range(20):
        queue.send(1)
        await asyncio.sleep(0.1)
    assert (buffer.stale, queue.receiving) == (1020, 2)
    receiving.cancel()
    await asyncio.wait([receiving])


@in_virtual_time
async def test_messages_are_deleted_together_and_within_a_second():
    queue = Queue()
    receiving = await receive_with(buffer_of(queue))
    for _ in range(12):
        queue.send(1)
        await asyncio.sleep(0.05)
    assert queue.deleted == [10]
    await asyncio.sleep(1)
    assert queue.deleted == [10, 2]
    queue.send(1)
    await asyncio.sleep(0.1)
    receiving.cancel()
    await asyncio.wait([receiving])
    assert queue.deleted == [10, 2, 1]


@in_virtual_time
async def test_a_queue_that_does_not_answer_delays_the_end_by_some_seconds():
    class Silent(Queue):
        async def delete(self, messages) -> None:
            await asyncio.sleep(100)

    deleter = MessageDeleter(Silent())
    await deleter.delete([Message("", "receipt", "message", sent_at=0)])
    await asyncio.sleep(2)  # one call is on its way
    began = asyncio.get_running_loop().time()
    await deleter.aclose()
    assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.1)


@in_virtual_time
async def test_a_long_poll_from_before_a_failure_is_no_recovery():
    queue, answers = Queue(), asyncio.Queue()

    async def receive():
        answer = await answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    queue.receive = receive
    buffer = buffer_of(queue)
    receiving = await receive_with(buffer)  # two long polls are open
    for answer, down in ((OSError("no such queue"), True), ([], True), ([], False)):
        answers.put_nowait(answer)
        await asyncio.sleep(0.01)
        assert buffer.queue_down is down
    receiving.cancel()
