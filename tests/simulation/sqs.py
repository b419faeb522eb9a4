"""SQS: delivers at least once, in any order.

A message that is not deleted becomes visible again, and moves to the dead-letter queue after `queue.max_receives`
receives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_backend.run.collect.queue import Message
from tests.simulation.environment import Environment
from tests.simulation.trainer import Trainer

_MAX_RECEIVES = 5
_MOST_MESSAGES = 10  # of one receive
_CALL_S = 60.0  # limit of a call, as the client of AWS sets it


@dataclass
class QueuedMessage:
    """A message in the queue. Times are virtual, except that `sent_at` is in unix seconds."""

    id: str
    body: str
    sent_at: float
    visible_at: float
    receives: int = 0


class Queue:
    """The run's queue and its dead-letter queue."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.messages: list[QueuedMessage] = []
        self.dead_letters: list[QueuedMessage] = []
        self.gone = False

    def send(self, body: str) -> None:
        if not self.gone:
            delay = self.env.random.random() * (5.0 if self.env.random.random() < 0.2 else 0.1)
            number = self.env.number("message")
            self.messages.append(QueuedMessage(f"m{number}", body, self.env.wall(), self.env.now() + delay))

    def lose(self) -> None:
        """Delete the queue."""
        self.env.note("the queue is deleted")
        self.gone = True
        self.messages.clear()


class SimQueue:
    """A `MessageQueue` for one trainer."""

    url = "https://sqs/queue"
    is_shared = False

    def __init__(self, queue: Queue, trainer: Trainer, wait_s: float = 20.0, visibility_s: float = 60.0) -> None:
        self.visibility_s = visibility_s
        self.on_delete: Callable[[Message], None] = lambda message: None
        self._queue = queue
        self._env = queue.env
        self._trainer = trainer
        self._wait_s = wait_s

    async def receive(self) -> list[Message]:
        await self._answer()
        until = self._env.now() + self._wait_s
        while True:
            await asyncio.sleep(0.05)
            self._check()
            now = self._env.now()
            visible = [message for message in self._queue.messages if message.visible_at <= now]
            if visible:
                return self._take(visible, now)
            if now >= until:
                return []
            later = [message.visible_at for message in self._queue.messages]
            await asyncio.sleep(max(0.05, min([until, now + 1.0, *later]) - now))

    def _take(self, visible: list[QueuedMessage], now: float) -> list[Message]:
        random = self._env.random
        found = []
        for message in random.sample(visible, min(len(visible), random.randint(1, _MOST_MESSAGES))):
            message.receives += 1
            if message.receives > _MAX_RECEIVES:
                self._queue.messages.remove(message)
                self._queue.dead_letters.append(message)
                continue
            message.visible_at = now + self.visibility_s
            found.append(Message(message.body, message.id, message.id, message.sent_at, message.receives))
        return found

    async def delete(self, messages: Sequence[Message]) -> None:
        await self._call()
        for message in messages:
            self.on_delete(message)
        gone = {message.receipt for message in messages}
        self._queue.messages = [message for message in self._queue.messages if message.id not in gone]

    async def extend_visibility(self, messages: Sequence[Message]) -> None:
        await self._call()
        self._hide(messages, self.visibility_s)

    async def release(self, messages: Sequence[Message]) -> None:
        if messages:
            await self._call()
            self._hide(messages, 0.0)

    def _hide(self, messages: Sequence[Message], seconds: float) -> None:
        held = {message.receipt for message in messages}
        for message in self._queue.messages:
            if message.id in held:
                message.visible_at = self._env.now() + seconds

    async def _call(self) -> None:
        await self._env.passes(0.05)
        await self._answer()
        self._check()

    async def _answer(self) -> None:
        """Raises OSError if no answer comes."""
        if self._env.is_silent("sqs"):
            await asyncio.sleep(_CALL_S)
            raise OSError("SQS gave no answer")

    def _check(self) -> None:
        """Raises OSError, or Killed."""
        self._trainer.require_alive()
        if self._queue.gone or self._env.chance("sqs"):
            raise OSError("SQS does not answer")
