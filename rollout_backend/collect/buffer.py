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
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from agent_wrapper.contract import (
    Announcement,
    ContractError,
    Outcome,
    ResultName,
    Rollout,
    notice_key,
    parse_result_key,
    result_key,
)
from rollout_backend.collect.inventory import inventory
from rollout_backend.collect.queue import AWS_ERRORS, AnnouncementQueue, Message
from rollout_backend.collect.store import ResultStore
from rollout_backend.collect.text_format import read_result
from rollout_backend.errors import ResultMissing, StoreError

log = logging.getLogger(__name__)


class ResultSink(Protocol):
    """A step, as the buffer sees it."""

    step: int

    def wants(self, rollout_id: str, attempt: int | None = None) -> bool:
        """Whether the rollout's result is wanted; with `attempt`, the notice that this attempt was lost."""
        ...

    def again(self, rollout_id: str) -> None:
        """An announcement of what is not wanted: settled already, never planned, or of an attempt given up."""
        ...

    def arrive(self, rollout: Rollout, announced_at: float | None, notice: bool = False) -> None:
        """A result that keeps to the contract, or the notice that this attempt was lost; found by listing, it was not
        announced."""
        ...

    def reject(self, rollout_id: str, error: ContractError) -> None:
        """A result that does not."""
        ...


class RolloutBuffer:
    def __init__(
        self,
        run_id: str,
        store: ResultStore,
        queue: AnnouncementQueue | None,
        fetches: int,
        retokenise: Callable[[Rollout], Awaitable[Rollout]] | None = None,
        verify: Callable[[Rollout], None] | None = None,
    ) -> None:
        """`queue` None: results are found by `sweep` alone. `retokenise` makes messages trainable, where it can.
        `verify` raises ContractError over what was not sampled as it says; see `gateway.seal`."""
        self._run_id = run_id
        self._store = store
        self._queue = queue
        self._retokenise = retokenise
        self._verify = verify
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
            items = [item for item in Announcement.decode(message.body) if not self._is_record(item)]
            named = [(self._locate(item), item) for item in items]
        except ContractError as error:
            return await self._refuse(message, error)
        taken = True
        for name, item in named:
            sink = self._sinks.get(name.step)
            if sink is None:
                self.stale += 1
            elif not sink.wants(name.rollout_id, name.attempt):
                sink.again(name.rollout_id)
            else:
                taken = await self._take(sink, name, item.key, message.sent_at) and taken
        return taken

    def _is_record(self, item: Announcement) -> bool:
        """Whether it names what a trainer wrote beside the results: S3 notifies of that as well. Evidence put aside
        for such a message would be told of again, and so for ever."""
        runs = rf"{re.escape(self._store.config.prefix)}runs/[^/]+/"
        return item.bucket == self._store.config.bucket and bool(re.match(rf"{runs}(?!steps/).", item.key))

    def _locate(self, item: Announcement) -> ResultName:
        bucket = self._store.config.bucket
        if item.bucket != bucket:
            raise ContractError("bucket.name", f"{item.bucket!r} is not this run's bucket {bucket!r}")
        return parse_result_key(self._store.config.prefix, self._run_id, item.key)

    async def _refuse(self, message: Message, error: ContractError) -> bool:
        self.refused += 1
        log.warning("message %s is refused: %s", message.message_id, error)
        return await self._quarantine(f"message {message.message_id}", error, message.body.encode())

    # --- by listing ---------------------------------------------------------------------------------------

    async def sweep(self, sink: ResultSink) -> bool:
        """Lists the step's prefix and takes what is wanted and was not heard of. True if all of it could be read.

        Raises StoreError if S3 does not list it.
        """
        complete = True
        found = await inventory(self._store, self._run_id, sink.step)
        for notices in (False, True):  # a result settles its rollout, whatever lost attempts there were
            wanted = [
                (key, name)
                for key, name in found.items()
                if (name.attempt is not None) == notices and sink.wants(name.rollout_id, name.attempt)
            ]
            complete = all(await asyncio.gather(*(self._take(sink, name, key) for key, name in wanted))) and complete
        return complete

    async def look(self, sink: ResultSink, attempts: Iterable[tuple[str, int]]) -> None:
        """Asks for the results of these rollouts by their keys, and for the notices of these attempts of them.
        What is not there is passed over."""
        place = self._store.config.prefix, self._run_id, sink.step

        async def ask(rollout_id: str, attempt: int) -> None:
            name = ResultName(sink.step, rollout_id, None)
            await self._take(sink, name, result_key(*place, rollout_id))
            if sink.wants(rollout_id, attempt):
                await self._take(sink, name._replace(attempt=attempt), notice_key(*place, rollout_id, attempt))

        await asyncio.gather(*(ask(rollout_id, attempt) for rollout_id, attempt in attempts))

    # --- either way ---------------------------------------------------------------------------------------

    async def _take(self, sink: ResultSink, name: ResultName, key: str, announced_at: float | None = None) -> bool:
        """Fetches a result or a notice and hands it over. False if a later try may do better."""
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
                return await self._reject(sink, name.rollout_id, key, error, b"")
        try:
            cap = self._store.config.max_result_bytes
            rollout = read_result(data, cap, run_id=self._run_id, step=name.step, rollout_id=name.rollout_id)
            self._check(rollout, name)
            if self._verify is not None:
                self._verify(rollout)
        except ContractError as error:
            return await self._reject(sink, name.rollout_id, key, error, data)
        if self._retokenise is not None:
            rollout = await self._retokenise(rollout)
        sink.arrive(rollout, announced_at, name.attempt is not None)
        return True

    def _check(self, rollout: Rollout, name: ResultName) -> None:
        wanted: dict[str, object] = {"run_id": self._run_id, "step": name.step, "rollout_id": name.rollout_id}
        if name.attempt is not None:
            wanted |= {"attempt": name.attempt, "outcome": Outcome.INFRA_ERROR}
        for field, value in wanted.items():
            if getattr(rollout, field) != value:
                raise ContractError(field, f"is {getattr(rollout, field)!r} in the result of {value!r}")
        if rollout.retokenised:  # or an agent could have tokens trained that nobody sampled
            raise ContractError("segments", "one is marked retokenised, which is for this side alone to do")

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
