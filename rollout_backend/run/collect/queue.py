"""Use the SQS queue of announcements. An announcement is a hint that a result exists.

Announcements may arrive more than once, in any order, or never.

A queue given by its URL is used unchanged. Otherwise, a queue and a dead-letter queue are created for the run and
deleted at its end; a dead-letter queue with messages is kept as evidence. A restarted run uses existing queues, even
if its settings would create them with other attributes. If SQS still blocks the name of a queue that was deleted less
than a minute ago, creation waits.
"""

import asyncio
import functools
import json
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from tenacity import RetryCallState, stop_after_attempt, wait_fixed

from rollout_backend.base import aws
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.logs import report_failure
from rollout_backend.base.names import derived_name
from rollout_backend.base.retry import retry
from rollout_backend.config import AwsConfig, QueueConfig, StorageConfig

log = logging.getLogger(__name__)

# The pause after a message is released grows by 1 s with every fourth receive.
_RECEIVES_PER_PAUSE_S = 4
# A backlog is received and deleted concurrently, so these are added to the receivers' connections.
_CONNECTIONS = 32
# SQS's limit for receive and delete.
_BATCH = 10
# SQS blocks a name for 60 s after the deletion.
_NAME_BLOCKED_S = 75.0
# The pause between two attempts to create a queue.
_PAUSE_S = 5.0
# Error codes if the attributes differ.
_EXISTS = ("QueueAlreadyExists", "QueueNameExists")
# SQS's maximum, because a run may be resumed days later.
_RETENTION_S = 14 * 24 * 3600
_DELETED_WITHIN_S = 1.0
_LAST_DELETE_S = 5.0
AWS_ERRORS = aws.CALL_ERRORS


@dataclass(frozen=True)
class Message:
    body: str
    receipt: str
    message_id: str
    sent_at: float
    """Unix seconds by SQS's clock."""
    receive_count: int = 1
    """Number of receives, including this one."""


class MessageQueue(Protocol):
    """The queue of a run's announcements. See `AnnouncementQueue`."""

    @property
    def visibility_s(self) -> float: ...

    @property
    def is_shared(self) -> bool: ...

    async def receive(self) -> list[Message]: ...

    async def delete(self, messages: Sequence[Message]) -> None: ...

    async def extend_visibility(self, messages: Sequence[Message]) -> None: ...

    async def release(self, messages: Sequence[Message]) -> None: ...


class AnnouncementQueue:
    """A run's queue. Use `open` to create one."""

    def __init__(
        self, config: QueueConfig, url: str, dead_url: str | None, client: Any, stack: AsyncExitStack
    ) -> None:
        self.visibility_s = config.visibility_s
        self.url = url
        # None if the queue was given by its URL. Such a queue is not deleted.
        self.dead_url = dead_url
        self._sqs = client
        self._receive = client.repeated(
            "receive_message",
            QueueUrl=url,
            MaxNumberOfMessages=_BATCH,
            WaitTimeSeconds=config.wait_s,
            VisibilityTimeout=config.visibility_s,
            AttributeNames=["SentTimestamp", "ApproximateReceiveCount"],
        )
        self._delete = client.repeated("delete_message_batch", QueueUrl=url)
        self._change_visibility = client.repeated("change_message_visibility_batch", QueueUrl=url)
        self._stack = stack

    @classmethod
    async def open(cls, config: QueueConfig, aws_config: AwsConfig, name: str) -> Self:
        """Open the queue that the settings name, or create queues with this name.

        Raises:
            PreflightError: the queue does not exist, cannot be created, or refuses a call.
        """
        async with AsyncExitStack() as stack:
            made = aws.client(
                "sqs",
                region=aws_config.region,
                endpoint_url=aws_config.endpoint_of("sqs"),
                read_timeout_s=config.wait_s + 15.0,
                connections=config.receivers + _CONNECTIONS,
                retries=2,
            )
            sqs = await stack.enter_async_context(made)
            with _explained(f"queue {config.url or name}", config):
                if config.url is not None:
                    await _probe(sqs, config.url)
                    url, dead_url = config.url, None
                else:
                    url, dead_url = await _create(sqs, config, name)
            kept = stack.pop_all()
        return cls(config, url, dead_url, sqs, kept)

    async def check(self, config: QueueConfig) -> CheckResult:
        """Receive and delete as a run does, and describe the queue. Raises PreflightError."""
        with _explained(f"queue {self.url}", config):
            dead_letters = "RedrivePolicy" in await _probe(self._sqs, self.url)
        if config.url is None:
            text = "queue: can be created for the run with its dead-letter queue, received from, and deleted"
            return CheckResult("ok", "queue.url", text)
        if dead_letters:
            return CheckResult("ok", "queue.url", "queue: there, with a dead-letter queue, and can be received from")
        text = "queue: there, but without a dead-letter queue, so a message that cannot be handled comes back until"
        return CheckResult("warning", "queue.url", f"{text} it expires: add a RedrivePolicy")

    async def receive(self) -> list[Message]:
        """Receive up to ten messages. Waits up to `queue.wait_s` for the first one.

        Raises one of AWS_ERRORS, or CredentialsExpired.
        """
        try:
            reply = await self._receive()
        except ClientError as error:
            aws.raise_if_expired(error, "SQS")
            raise
        return _messages(reply)

    async def delete(self, messages: Sequence[Message]) -> None:
        """Delete messages. One that is not deleted is received again, as a duplicate. Raises one of AWS_ERRORS."""
        for start in range(0, len(messages), _BATCH):
            batch = messages[start : start + _BATCH]
            entries = [{"Id": str(i), "ReceiptHandle": message.receipt} for i, message in enumerate(batch)]
            reply = await self._delete(Entries=entries)
            for failed in reply.get("Failed", ()):
                log.warning("a message was not deleted and will be received again: %s", failed.get("Message"))

    @property
    def is_shared(self) -> bool:
        """Whether other runs may use the queue too, because this run did not create it."""
        return self.dead_url is None

    async def extend_visibility(self, messages: Sequence[Message]) -> None:
        """Hide messages for another `visibility_s`. Raises one of AWS_ERRORS."""
        await self._hide(messages, lambda message: self.visibility_s)

    async def release(self, messages: Sequence[Message]) -> None:
        """Make messages visible to other receivers, first immediately, later after a pause. Raises one of AWS_ERRORS.

        With two runs, each receives the wrong message half of the time: a doubling pause would hide one message in
        ten for half a minute.
        """
        if any(message.receive_count >= _RECEIVES_PER_PAUSE_S for message in messages):
            # Emulators look for messages once per second: after whole seconds, the same run would always come first.
            await asyncio.sleep(random.random())  # noqa: S311
        await self._hide(messages, lambda message: message.receive_count // _RECEIVES_PER_PAUSE_S)

    async def _hide(self, messages: Sequence[Message], seconds: Callable[[Message], int]) -> None:
        for start in range(0, len(messages), _BATCH):
            entries = [
                {"Id": str(i), "ReceiptHandle": message.receipt, "VisibilityTimeout": seconds(message)}
                for i, message in enumerate(messages[start : start + _BATCH])
            ]
            await self._change_visibility(Entries=entries)

    async def aclose(self, *, delete: bool = True) -> None:
        """Close the client and delete the queues that were created for the run.

        Pass `delete=False` if another manager may own the queues. A queue that no longer exists is not an error.
        """
        try:
            if delete and self.dead_url is not None:
                await delete_queues(self._sqs, self.url, self.dead_url)
        finally:
            await self._stack.aclose()


class MessageDeleter:
    """Deletes the handled messages of one queue within a second, and in batches.

    At a few results per second, each message would otherwise need a separate call. A message that is not deleted,
    because SQS failed or this process was killed, is received again and counted as a duplicate.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        # Messages are no longer hidden once they are handled.
        self._within_s = min(_DELETED_WITHIN_S, queue.visibility_s / 4)
        self._messages: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None
        self._deleting: set[asyncio.Task[None]] = set()

    async def delete(self, messages: Sequence[Message]) -> None:
        """Delete these messages: immediately if a batch is full, otherwise soon."""
        self._messages += messages
        if len(self._messages) >= _BATCH:
            await self._delete_all()
        elif self._messages and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self._start)

    async def aclose(self) -> None:
        """Delete the remaining messages. Gives up after some seconds if the queue does not answer."""
        try:
            async with asyncio.timeout(_LAST_DELETE_S):
                await asyncio.gather(self._delete_all(), *self._deleting)
        except TimeoutError:
            log.warning("the queue does not answer: messages that were handled will be received again")

    def _start(self) -> None:
        deleting = asyncio.create_task(self._delete_all())
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleting.discard)
        deleting.add_done_callback(report_failure("deleting messages"))

    async def _delete_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        messages, self._messages = self._messages, []
        try:
            await self._queue.delete(messages)
        except AWS_ERRORS as error:
            log.warning("%d messages will be received again: %s", len(messages), error)


def _messages(reply: Mapping[str, Any]) -> list[Message]:
    try:
        return [
            Message(
                body=item["Body"],
                receipt=item["ReceiptHandle"],
                message_id=item["MessageId"],
                sent_at=int(item["Attributes"]["SentTimestamp"]) / 1000,
                receive_count=int(item["Attributes"]["ApproximateReceiveCount"]),
            )
            for item in reply.get("Messages") or ()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ResponseParserError(f"SQS's answer is not one to ReceiveMessage: {error!r}") from error


async def delete_queues(sqs: Any, url: str, dead_url: str) -> None:
    """Delete a run's queue and its dead-letter queue, which is kept if it has messages. Failures are logged."""
    for queue in (url, dead_url):
        try:
            held = 0
            if queue == dead_url:
                names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
                reply = await sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)
                held = sum(int(reply["Attributes"][name]) for name in names)
            if held:
                log.warning("%d messages that could not be handled are kept in %s", held, queue)
            else:
                await sqs.delete_queue(QueueUrl=queue)
        except AWS_ERRORS as error:
            log.warning("the run's queue %s could not be deleted: %s", queue, error)


def queue_name(storage: StorageConfig, run_id: str) -> str:
    """Return the queue's name, at most 80 characters (SQS's limit) including the dead-letter queue's suffix.

    The name includes a digest of the run's location in S3, because runs in two buckets may have the same id.
    """
    place = f"s3://{storage.bucket}/{storage.prefix}runs/{run_id}"
    return f"rollout-{derived_name(run_id, 'A-Za-z0-9_-', 63, of=place)}"


async def check_queue(config: QueueConfig, aws_config: AwsConfig) -> CheckResult:
    """Make the calls that a run makes to its queue, and describe the queue.

    If the run would create its queues, this creates queues under another name and deletes them.

    Raises:
        PreflightError: the queue does not exist, cannot be created, or refuses a call.
    """
    queue = await AnnouncementQueue.open(config, aws_config, f"rollout-check-{secrets.token_hex(4)}")
    try:
        return await queue.check(config)
    finally:
        await queue.aclose()


async def _probe(sqs: Any, url: str) -> Mapping[str, str]:
    """Make the calls of a run without changing the queue: a received message is immediately visible again. Return the
    queue's attributes."""
    reply = await sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn", "RedrivePolicy"])
    await sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=1, WaitTimeSeconds=0, VisibilityTimeout=0)
    for call in (sqs.delete_message, functools.partial(sqs.change_message_visibility, VisibilityTimeout=0)):
        try:
            await call(QueueUrl=url, ReceiptHandle="not-a-receipt")
        except ClientError as error:
            if aws.is_denied(error):
                # Any other error is about the receipt, which is invalid on purpose.
                raise
    attributes: Mapping[str, str] = reply["Attributes"]
    return attributes


def _explained(what: str, config: QueueConfig) -> AbstractContextManager[None]:
    return aws.explained(what, "queue" if config.url is None else "queue.url")


async def _create(sqs: Any, config: QueueConfig, name: str) -> tuple[str, str]:
    kept = {"MessageRetentionPeriod": str(_RETENTION_S)}
    dead_url = await _create_one(sqs, f"{name}-dlq", kept)
    reply = await sqs.get_queue_attributes(QueueUrl=dead_url, AttributeNames=["QueueArn"])
    redrive = {"deadLetterTargetArn": reply["Attributes"]["QueueArn"], "maxReceiveCount": config.max_receives}
    attributes = {**kept, "VisibilityTimeout": str(config.visibility_s), "RedrivePolicy": json.dumps(redrive)}
    return await _create_one(sqs, name, attributes), dead_url


async def _create_one(sqs: Any, name: str, attributes: dict[str, str]) -> str:
    def warn(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        why = "its name is blocked for a minute after its deletion" if _deleted_recently(error) else str(error)
        log.warning("queue %s cannot be created yet (%s): retrying", name, why)

    async def create() -> str:
        try:
            reply = await sqs.create_queue(QueueName=name, Attributes=attributes)
        except ClientError as error:
            if not aws.code_of(error).endswith(_EXISTS):
                raise
            # Each receive sets the visibility timeout, and the other attributes need not match.
            log.info("queue %s exists with other attributes and is used unchanged", name)
            reply = await sqs.get_queue_url(QueueName=name)
        return str(reply["QueueUrl"])

    return await retry(
        create,
        lambda error: _deleted_recently(error) or _is_busy(error),
        wait_fixed(_PAUSE_S),
        stop=stop_after_attempt(1 + round(_NAME_BLOCKED_S / _PAUSE_S)),
        before_sleep=warn,
    )


def _deleted_recently(error: BaseException | None) -> bool:
    return isinstance(error, ClientError) and aws.code_of(error).endswith("QueueDeletedRecently")


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, ClientError) and (aws.is_throttled(error) or aws.status_of(error) >= 500)
