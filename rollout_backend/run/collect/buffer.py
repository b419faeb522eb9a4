"""Receive announcements, list the prefix when idle, and fetch the results found either way for their step.

Invariants:

- A message is deleted, within a second, only once its results were delivered or can never be used.
- No message or object can stop the receivers. Malformed ones are quarantined with the reason. The only exception
  about a single message or object that leaves this module is CredentialsExpired.
- An announcement gives access only to this run's results. A message for another run that shares the queue is left to
  that run until it has been received 20 times.

Steps `attach` and `detach`; the receivers run for the whole run.
"""

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TypeVar

from tenacity import wait_exponential_jitter

from agent_wrapper.contract import (
    Announcement,
    ContractError,
    ResultName,
    Rollout,
    failure_marker_key,
    parse_result_key,
    result_key,
    step_prefix,
)
from agent_wrapper.contract.keys import ID_PATTERN
from rollout_backend.base import aws
from rollout_backend.base.logs import report_failure
from rollout_backend.base.retry import retry
from rollout_backend.config import CollectConfig
from rollout_backend.errors import CredentialsExpired, StoreError
from rollout_backend.run.collect.fetcher import FetchStatus, Quarantine, ResultDecoder, ResultFetcher, ResultSink
from rollout_backend.run.collect.queue import AWS_ERRORS, Message, MessageDeleter, MessageQueue
from rollout_backend.run.collect.store import ObjectStore

log = logging.getLogger(__name__)

# Listing this many keys of a step takes 50 calls to S3. A hostile agent can flood the prefix, where it may write.
MAX_KEYS = 50_000
# Even if announcements arrive, a step is listed after this many `collect.list_after_idle_s`.
IDLE_INTERVALS = 3

_T = TypeVar("_T")

_BACK_OFF = wait_exponential_jitter(multiplier=0.5, max=30)
# A batch has at most 10 messages, and SQS often returns fewer than it holds.
_LARGE_BATCH = 5
# After 20 receives, the run that a message is for has received it or has ended.
_RECEIVES = 20


class MessageStatus(Enum):
    """The result of handling a message."""

    DONE = "done"
    """Delete the message."""
    UNKNOWN = "unknown"
    """S3 did not answer, or has no such object yet: receive the message again."""
    OF_ANOTHER_RUN = "of another run"
    """Release the message: the run that shares the queue may receive it immediately."""


class RolloutBuffer:
    """Collects the results of one run and delivers each to its step."""

    def __init__(
        self,
        run_id: str,
        store: ObjectStore,
        queue: MessageQueue | None,
        max_fetches: int,
        verify: Callable[[Rollout], None] | None = None,
    ) -> None:
        """Create a buffer.

        Args:
            run_id: The run whose results are collected.
            store: The store from which results are read.
            queue: The queue of announcements. None: results are found only by `sweep`.
            max_fetches: Maximum number of concurrent fetches.
            verify: See `ResultDecoder`.
        """
        self._run_id = run_id
        self._store = store
        self._queue = queue
        decoder = ResultDecoder(run_id, store.config.max_result_bytes, verify)
        self._quarantine = Quarantine(store, run_id)
        self._fetcher = ResultFetcher(store, decoder, self._quarantine, max_fetches)
        self.max_fetches = max_fetches
        self.max_receives = _RECEIVES
        # Batches have 10 messages, so one message waits for each that is being fetched.
        self._batches = max(1, 2 * max_fetches // 10)
        self._sinks: dict[int, ResultSink] = {}
        # Steps with too many keys to list completely.
        self._flooded: set[int] = set()
        self._deleter = MessageDeleter(queue) if queue is not None else None
        # `refused` counts malformed messages and messages that name objects outside this run, `stale` announcements
        # for steps that have ended or not started, and `dangling` announcements of objects that do not exist yet.
        self.refused = 0
        self.stale = 0
        self.dangling = 0
        self.queue_down = queue is None
        self._receive_failures = 0
        # In seconds of the event loop's clock.
        self.last_announcement_at = 0.0

    def attach(self, sink: ResultSink) -> None:
        assert sink.step not in self._sinks, f"step {sink.step} is being collected already"
        self._sinks[sink.step] = sink

    def detach(self, sink: ResultSink) -> None:
        del self._sinks[sink.step]
        self._fetcher.forget(sink.step)
        self._flooded.discard(sink.step)

    def has_backlog(self) -> bool:
        """Return whether results are waiting because the maximum number of fetches is running."""
        return self._fetcher.is_busy

    # --- by announcement ----------------------------------------------------------------------------------

    async def run(self, receivers: int) -> None:
        """Receive announcements until cancelled. Without a queue, only wait to be cancelled."""
        if self._queue is None:
            await asyncio.Event().wait()
            return
        room = asyncio.Semaphore(receivers + self._batches)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(receivers):
                    tasks.create_task(self._receive(self._queue, room, tasks))
        finally:
            assert self._deleter is not None
            await self._deleter.aclose()

    async def _receive(
        self, queue: MessageQueue, room: asyncio.Semaphore, tasks: asyncio.TaskGroup, *, backlog: bool = False
    ) -> None:
        """Receive batches forever, or only while there is a backlog. Reserve `room` before receiving a batch, and
        release it after handling.

        A large batch indicates a backlog: if there is room, another receiver helps with it.
        """
        while True:
            await room.acquire()
            # Retried without a limit, because listing finds the results in the meantime.
            messages = await retry(lambda: self._receive_once(queue), AWS_ERRORS, _BACK_OFF)
            batch = tasks.create_task(self.handle(queue, messages))
            batch.add_done_callback(lambda _: room.release())
            if len(messages) >= _LARGE_BATCH:
                if not room.locked():
                    tasks.create_task(self._receive(queue, room, tasks, backlog=True))
            elif backlog:
                return

    async def _receive_once(self, queue: MessageQueue) -> list[Message]:
        failures = self._receive_failures
        try:
            messages = await queue.receive()
        except AWS_ERRORS as error:
            if not self.queue_down:
                log.warning("the queue does not answer; results are found by listing: %s", aws.reason(error))
            self.queue_down = True
            self._receive_failures += 1
            raise
        # SQS also answers long polls that were sent before the queue was deleted.
        if failures == self._receive_failures:
            self.queue_down = False
        if messages:
            self.last_announcement_at = asyncio.get_running_loop().time()
        return messages

    async def handle(self, queue: MessageQueue, messages: list[Message]) -> None:
        """Deliver the results that these messages name, and delete the messages that are done."""
        if not messages:
            return
        hiding = asyncio.create_task(self._keep_hidden(queue, messages))
        hiding.add_done_callback(report_failure("hiding messages that are handled"))
        try:
            done = await asyncio.gather(
                *(
                    log_defects(
                        f"message {message.message_id}",
                        functools.partial(self.handle_message, queue, message),
                        MessageStatus.UNKNOWN,
                    )
                    for message in messages
                )
            )
        finally:
            hiding.cancel()
        states = [*zip(messages, done, strict=True)]
        others = [message for message, state in states if state is MessageStatus.OF_ANOTHER_RUN]
        assert self._deleter is not None
        await self._deleter.delete([message for message, state in states if state is MessageStatus.DONE])
        try:
            await queue.release(others)
        except AWS_ERRORS as error:
            log.warning("%d messages will be received again: %s", len(others), error)

    async def _keep_hidden(self, queue: MessageQueue, messages: list[Message]) -> None:
        """Extend the visibility timeout of messages that are being handled, so that none is received again."""
        while True:
            await asyncio.sleep(queue.visibility_s / 2)
            try:
                await queue.extend_visibility(messages)
            except AWS_ERRORS as error:
                log.warning("%d messages may be received again while they are handled: %s", len(messages), error)

    async def handle_message(self, queue: MessageQueue, message: Message) -> MessageStatus:
        """Deliver the results that this message names."""
        try:
            items = [item for item in Announcement.decode(message.body) if not self._is_trainer_object(item)]
            if (
                queue.is_shared
                and message.receive_count < self.max_receives
                and any(map(self._is_of_another_run, items))
            ):
                return MessageStatus.OF_ANOTHER_RUN
            results = [(self._parse_key(item), item) for item in items]
        except ContractError as error:
            self.refused += 1
            log.warning("message %s is refused: %s", message.message_id, error)
            recorded = await self._quarantine.record(f"message {message.message_id}", error, message.body.encode())
            return MessageStatus.DONE if recorded else MessageStatus.UNKNOWN
        handled = True
        for name, item in results:
            sink = self._sinks.get(name.step)
            if sink is None:
                self.stale += 1
            else:
                fetched = await self._fetcher.fetch(sink, name, item.key, message.sent_at)
                self.dangling += fetched is FetchStatus.ABSENT
                handled = handled and fetched is FetchStatus.HANDLED
        return MessageStatus.DONE if handled else MessageStatus.UNKNOWN

    def _is_trainer_object(self, item: Announcement) -> bool:
        """Return whether it names an object that a trainer wrote, such as a manifest, a quarantine record or a probe.

        S3 announces these too. Quarantining such a message would write another object, which S3 would announce again,
        in an endless loop.
        """
        written = rf"{re.escape(self._store.config.prefix)}runs/(?:[^/]+/(?!steps/)|preflight/steps/probe-)."
        return item.bucket == self._store.config.bucket and bool(re.match(written, item.key))

    def _is_of_another_run(self, item: Announcement) -> bool:
        match = re.fullmatch(rf"(.*/)?runs/({ID_PATTERN})/steps/[^/]+/[^/]+", item.key)
        place = self._store.config.bucket, self._store.config.prefix, self._run_id
        return match is not None and (item.bucket, match[1] or "", match[2]) != place

    def _parse_key(self, item: Announcement) -> ResultName:
        bucket = self._store.config.bucket
        if item.bucket != bucket:
            raise ContractError("bucket.name", f"{item.bucket!r} is not this run's bucket {bucket!r}")
        return parse_result_key(self._store.config.prefix, self._run_id, item.key)

    # --- by listing ---------------------------------------------------------------------------------------

    async def sweep(self, sink: ResultSink) -> bool:
        """List the step's prefix and fetch all wanted results. Return whether all of them were read.

        If there are too many keys to list, the results of unsettled rollouts are fetched by key instead.

        Raises:
            StoreError: S3 did not list the prefix.
        """
        found = await self._list_wanted(sink)
        if found is None:
            return all(await asyncio.gather(*(self.fetch_by_key(sink, *each) for each in sink.pending())))
        fetched: list[FetchStatus] = []
        # Results are fetched before failure markers, because they settle rollouts.
        for names in found:
            fetched += await asyncio.gather(*(self._try_to_fetch(sink, name, key) for key, name in names.items()))
        return all(each is FetchStatus.HANDLED for each in fetched)

    async def list_when_idle(self, sink: ResultSink, config: CollectConfig) -> None:
        """List the step's prefix until cancelled: after `list_after_idle_s` without an announcement, and after three
        times that in any case, because other announcements can mask a lost one. Without a queue, list every
        `list_interval_s`."""
        loop = asyncio.get_running_loop()
        listed_at = loop.time()
        while True:
            interval = config.list_interval_s if self.queue_down else config.list_after_idle_s
            due = listed_at + interval
            if not self.queue_down:
                due = min(max(due, self.last_announcement_at + interval), listed_at + IDLE_INTERVALS * interval)
            wait = due - loop.time()
            if wait > 0:
                # The queue may fail during the wait.
                await asyncio.sleep(min(wait, config.list_interval_s))
                continue
            listed_at = loop.time()
            try:
                await self.sweep(sink)
            except StoreError as error:
                log.warning("%s; it is listed again", error)

    async def list_results(self, sink: ResultSink) -> set[str] | None:
        """Return the rollouts with a wanted result or failure marker in S3; None if there are too many keys to list.

        Raises:
            StoreError: S3 did not list the prefix.
        """
        found = await self._list_wanted(sink)
        return None if found is None else {name.rollout_id for names in found for name in names.values()}

    async def _list_wanted(self, sink: ResultSink) -> tuple[dict[str, ResultName], dict[str, ResultName]] | None:
        """Return the step's wanted results, and its wanted failure markers, by key; None if there are too many keys.

        Raises:
            StoreError: S3 did not list the prefix.
        """
        if sink.step in self._flooded:
            return None
        prefix, listed = self._store.config.prefix, 0
        results: dict[str, ResultName] = {}
        failure_markers: dict[str, ResultName] = {}
        async for key in self._store.keys(step_prefix(prefix, self._run_id, sink.step)):
            listed += 1
            if listed > MAX_KEYS:
                log.warning(
                    "more than %d objects are stored under %s, more than this run's agents write: from now on "
                    "open results are fetched by key, which takes longer. Set storage.presigned=true so that agents "
                    "can write only their own result",
                    MAX_KEYS,
                    step_prefix(prefix, self._run_id, sink.step),
                )
                self._flooded.add(sink.step)
                return None
            with contextlib.suppress(ContractError):
                # Other objects under the prefix are neither results nor failure markers.
                name = parse_result_key(prefix, self._run_id, key)
                if sink.is_wanted(name.rollout_id, name.attempt):
                    (results if name.attempt is None else failure_markers)[key] = name
        return results, failure_markers

    async def fetch_by_key(self, sink: ResultSink, rollout_id: str, attempt: int) -> bool:
        """Fetch a rollout's result by key or, if there is none, this attempt's failure marker.

        Return whether S3 answered, regardless of whether the objects exist.
        """
        place = self._store.config.prefix, self._run_id, sink.step
        name = ResultName(sink.step, rollout_id, None)
        fetched = await self._try_to_fetch(sink, name, result_key(*place, rollout_id))
        if fetched is FetchStatus.ABSENT and attempt:
            key = failure_marker_key(*place, rollout_id, attempt)
            fetched = await self._try_to_fetch(sink, name._replace(attempt=attempt), key)
        return fetched is not FetchStatus.UNKNOWN

    async def fetch_written(self, step: int, rollout_id: str, attempt: int) -> None:
        """Fetch what this trainer wrote for a rollout, if its step is still being collected."""
        sink = self._sinks.get(step)
        if sink is not None:
            await self.fetch_by_key(sink, rollout_id, attempt)

    async def _try_to_fetch(self, sink: ResultSink, name: ResultName, key: str) -> FetchStatus:
        return await log_defects(key, lambda: self._fetcher.fetch(sink, name, key), FetchStatus.UNKNOWN)


async def log_defects(what: str, work: Callable[[], Awaitable[_T]], failed: _T) -> _T:
    """Handle one message or object, and return `failed` if `work` raises.

    A defect in this code is logged and retried later instead of ending the run. CredentialsExpired is raised, because
    it concerns all objects.
    """
    try:
        return await work()
    except CredentialsExpired:
        raise
    except Exception:
        log.exception("handling %s failed; it is retried", what)
        return failed
