"""Delete handled messages in batches: at a few results per second, each message would otherwise need a separate call.

A message that is not deleted, because SQS failed or this process was killed, is received again and counted as a
duplicate.
"""

import asyncio
import logging
from collections.abc import Sequence

from rollout_backend.collect.queue import AWS_ERRORS, Message, MessageQueue

log = logging.getLogger(__name__)

_TOGETHER = 10  # SQS's limit per call
_WITHIN_S = 1.0
_LAST_S = 5.0


class MessageDeleter:
    """Deletes the messages of one queue within a second."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self._within_s = min(_WITHIN_S, queue.visibility_s / 4)  # messages are no longer hidden once they are handled
        self._messages: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None
        self._deleting: set[asyncio.Task[None]] = set()

    async def delete(self, messages: Sequence[Message]) -> None:
        """Delete these messages: immediately if a batch is full, otherwise soon."""
        self._messages += messages
        if len(self._messages) >= _TOGETHER:
            await self._delete_all()
        elif self._messages and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self._start)

    async def aclose(self) -> None:
        """Delete the remaining messages. Gives up after some seconds if the queue does not answer."""
        try:
            async with asyncio.timeout(_LAST_S):
                await asyncio.gather(self._delete_all(), *self._deleting)
        except TimeoutError:
            log.warning("the queue does not answer: messages that were handled will be received again")

    def _start(self) -> None:
        deleting = asyncio.create_task(self._delete_all())
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleting.discard)

    async def _delete_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        messages, self._messages = self._messages, []
        try:
            await self._queue.delete(messages)
        except AWS_ERRORS as error:
            log.warning("%d messages will be received again: %s", len(messages), error)
