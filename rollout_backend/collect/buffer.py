"""Receives announcements, fetches what they name, checks it, and hands it to its step.

What must always hold:

- a message is deleted only when what it names is safely in, or can never be of use;
- nothing that a message or an object contains stops the receiving: what cannot be understood is put into quarantine
  with its reason;
- an announcement opens nothing but this run's own results.

Steps come and go (`attach`, `detach`); the receivers run as long as the run does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from agent_wrapper.contract import Announcement, ContractError, Rollout, parse_result_key, result_key
from rollout_backend.collect.inventory import inventory
from rollout_backend.collect.queue import AWS_ERRORS, AnnouncementQueue, Message
from rollout_backend.collect.store import ResultStore
from rollout_backend.errors import ResultMissing, StoreError

log = logging.getLogger(__name__)


class ResultSink(Protocol):
    """A step, as the buffer sees it."""

    step: int

    def wants(self, rollout_id: str) -> bool: ...

    def again(self, rollout_id: str) -> None:
        """An announcement of a rollout that is not wanted: settled already, or never planned."""
        ...

    def arrive(self, rollout: Rollout, announced_at: float | None) -> None:
        """A result that keeps to the contract; found by listing, it was not announced."""
        ...

    def reject(self, rollout_id: str, error: ContractError) -> None:
        """A result that does not."""
        ...


class RolloutBuffer:
    def __init__(self, run_id: str, store: ResultStore, queue: AnnouncementQueue | None, fetches: int) -> None:
        """`queue` None: results are found by `sweep` alone."""
        self._run_id = run_id
        self._store = store
        self._queue = queue
        self._fetching = asyncio.Semaphore(fetches)
        self._sinks: dict[int, ResultSink] = {}
        self.refused = 0  # messages that name nothing of this run's, or cannot be understood
        self.stale = 0  # announcements for steps that are over, or not begun
        self.dangling = 0  # announcements of objects that are not there (yet)
        self.queue_down = queue is None
        self.heard_at = 0.0  # loop seconds of the last announcement

    def attach(self, sink: ResultSink) -> None:
        assert sink.step not in self._sinks, f"step {sink.step} is being collected already"
        self._sinks[sink.step] = sink

    def detach(self, sink: ResultSink) -> None:
        del self._sinks[sink.step]

    # --- by announcement ----------------------------------------------------------------------------------

    async def run(self, receivers: int) -> None:
        """Receives until cancelled; without a queue there is nothing to do until then."""
        if self._queue is None:
            await asyncio.Event().wait()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(receivers):
                group.create_task(self._receive(self._queue))

    async def _receive(self, queue: AnnouncementQueue) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(AWS_ERRORS), wait=wait_exponential_jitter(multiplier=0.5, max=30)
        )
        async with asyncio.TaskGroup() as handling:
            while True:
                async for attempt in retrying:  # for ever: S3 is listed meanwhile
                    with attempt:
                        messages = await self._receive_once(queue)
                if messages:
                    handling.create_task(self._handle(queue, messages))

    async def _receive_once(self, queue: AnnouncementQueue) -> list[Message]:
        try:
            messages = await queue.receive()
        except AWS_ERRORS as error:
            if not self.queue_down:
                log.warning("the queue does not answer, results are found by listing: %s", error)
            self.queue_down = True
            raise
        self.queue_down = False
        if messages:
            self.heard_at = asyncio.get_running_loop().time()
        return messages

    async def _handle(self, queue: AnnouncementQueue, messages: list[Message]) -> None:
        done = await asyncio.gather(*(self._read(message) for message in messages))
        finished = [message for message, deletable in zip(messages, done, strict=True) if deletable]
        try:
            await queue.delete(finished)
        except AWS_ERRORS as error:
            log.warning("%d messages were not deleted and will come again: %s", len(finished), error)

    async def _read(self, message: Message) -> bool:
        """Deals with one message. True if it may be deleted."""
        try:
            named = [(self._locate(item), item) for item in Announcement.decode(message.body)]
        except ContractError as error:
            return await self._refuse(message, error)
        taken = True
        for (step, rollout_id), item in named:
            sink = self._sinks.get(step)
            if sink is None:
                self.stale += 1
            elif not sink.wants(rollout_id):
                sink.again(rollout_id)
            else:
                taken = await self._take(sink, rollout_id, item.key, message.sent_at) and taken
        return taken

    def _locate(self, item: Announcement) -> tuple[int, str]:
        bucket = self._store.config.bucket
        if item.bucket != bucket:
            raise ContractError("bucket.name", f"{item.bucket!r} is not this run's bucket {bucket!r}")
        return parse_result_key(self._store.config.prefix, self._run_id, item.key)

    async def _refuse(self, message: Message, error: ContractError) -> bool:
        self.refused += 1
        log.warning("message %s is refused: %s", message.message_id, error)
        return await self._quarantine(f"message {message.message_id}", error, message.body.encode())

    # --- by listing ---------------------------------------------------------------------------------------

    async def sweep(self, sink: ResultSink) -> None:
        """Lists the step's prefix and takes what is wanted and was not heard of. Raises StoreError."""
        found = await inventory(self._store, self._run_id, sink.step)
        wanted = [(rollout_id, key) for rollout_id, key in found.items() if sink.wants(rollout_id)]
        await asyncio.gather(*(self._take(sink, rollout_id, key) for rollout_id, key in wanted))

    async def look(self, sink: ResultSink, rollout_ids: Iterable[str]) -> None:
        """Asks for these results by their keys. Those that are not there are passed over."""
        prefix = self._store.config.prefix
        keys = {rollout_id: result_key(prefix, self._run_id, sink.step, rollout_id) for rollout_id in rollout_ids}
        await asyncio.gather(*(self._take(sink, rid, key) for rid, key in keys.items()))

    # --- either way ---------------------------------------------------------------------------------------

    async def _take(self, sink: ResultSink, rollout_id: str, key: str, announced_at: float | None = None) -> bool:
        """Fetches a result and hands it over. False if a later try may do better."""
        async with self._fetching:
            try:
                data = await self._store.get(key)
            except ResultMissing:
                self.dangling += announced_at is not None
                return False
            except StoreError as error:
                log.warning("%s; it is tried again", error)
                return False
            except ContractError as error:
                return await self._reject(sink, rollout_id, key, error, b"")
        try:
            rollout = Rollout.decode(data, self._store.config.max_result_bytes)
            self._check_ids(rollout, sink.step, rollout_id)
        except ContractError as error:
            return await self._reject(sink, rollout_id, key, error, data)
        sink.arrive(rollout, announced_at)
        return True

    def _check_ids(self, rollout: Rollout, step: int, rollout_id: str) -> None:
        wanted = {"run_id": self._run_id, "step": step, "rollout_id": rollout_id}
        for name, value in wanted.items():
            if getattr(rollout, name) != value:
                raise ContractError(name, f"is {getattr(rollout, name)!r} in the result of {value!r}")

    async def _reject(
        self, sink: ResultSink, rollout_id: str, key: str, error: ContractError, evidence: bytes
    ) -> bool:
        log.warning("the result %s cannot be used: %s", key, error)
        if not await self._quarantine(key, error, evidence):
            return False
        sink.reject(rollout_id, error)
        return True

    async def _quarantine(self, what: str, error: ContractError, evidence: bytes) -> bool:
        try:
            await self._store.quarantine(self._run_id, what, str(error), evidence)
        except StoreError as failure:
            log.warning("%s; it is tried again", failure)
            return False
        return True
