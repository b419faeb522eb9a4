"""Announcements on SQS: hints that a result is there. At least once, in any order, perhaps never.

A queue given by its URL is used as it is. Otherwise one is made for the run, with a dead-letter queue, and both are
deleted at the end; a dead-letter queue that holds messages stays, as evidence. A run started again under the same id
takes over those that are there, and waits where SQS still blocks the name of one that was deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from botocore.exceptions import BotoCoreError, ClientError
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_fixed

from rollout_backend import aws
from rollout_backend.config import AwsConfig, QueueConfig

log = logging.getLogger(__name__)

_BATCH = 10  # SQS's own limit for a receive and for a delete
_NAME_BLOCKED_S = 75.0  # SQS: 60, from the deletion
_RETENTION_S = 14 * 24 * 3600  # the longest SQS offers: a run may be resumed days later
AWS_ERRORS = (ClientError, BotoCoreError, OSError, TimeoutError)


@dataclass(frozen=True)
class Message:
    body: str
    receipt: str
    message_id: str
    sent_at: float  # unix seconds, by SQS's clock


class AnnouncementQueue:
    """Made with `open`."""

    def __init__(
        self, config: QueueConfig, url: str, dead_url: str | None, client: Any, stack: AsyncExitStack
    ) -> None:
        self._config = config
        self.url = url
        self.dead_url = dead_url  # None: the queue is not ours to delete
        self._sqs = client
        self._stack = stack

    @classmethod
    async def open(cls, config: QueueConfig, aws_config: AwsConfig, run_id: str) -> Self:
        """Raises PreflightError if the queue is not there, cannot be made, or refuses us."""
        async with AsyncExitStack() as stack:
            made = aws.client(
                "sqs",
                region=aws_config.region,
                endpoint_url=aws_config.endpoint_url,
                read_timeout_s=config.wait_s + 15.0,
                connections=config.receivers + 8,
                retries=2,
            )
            sqs = await stack.enter_async_context(made)
            try:
                if config.url is not None:
                    await sqs.get_queue_attributes(QueueUrl=config.url, AttributeNames=["QueueArn"])
                    url, dead_url = config.url, None
                else:
                    url, dead_url = await _create(sqs, config, run_id)
            except (ClientError, BotoCoreError) as error:
                name = f"queue {config.url or queue_name(run_id)}"
                raise aws.preflight_error(error, name, "queue.url") from error
            return cls(config, url, dead_url, sqs, stack.pop_all())
        raise AssertionError("unreachable")

    async def receive(self) -> list[Message]:
        """Up to ten messages, once there is at least one or `wait_s` has passed.

        Raises one of AWS_ERRORS, or CredentialsExpired.
        """
        try:
            reply = await self._sqs.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=_BATCH,
                WaitTimeSeconds=self._config.wait_s,
                VisibilityTimeout=self._config.visibility_s,
                AttributeNames=["SentTimestamp"],
            )
        except ClientError as error:
            aws.end_if_expired(error, "SQS")
            raise
        return [
            Message(
                body=item["Body"],
                receipt=item["ReceiptHandle"],
                message_id=item["MessageId"],
                sent_at=int(item["Attributes"]["SentTimestamp"]) / 1000,
            )
            for item in reply.get("Messages", ())
        ]

    async def delete(self, messages: Sequence[Message]) -> None:
        """Raises one of AWS_ERRORS. What is not deleted comes again, and is then a duplicate."""
        for start in range(0, len(messages), _BATCH):
            batch = messages[start : start + _BATCH]
            entries = [{"Id": str(i), "ReceiptHandle": message.receipt} for i, message in enumerate(batch)]
            reply = await self._sqs.delete_message_batch(QueueUrl=self.url, Entries=entries)
            for failed in reply.get("Failed", ()):
                log.warning("a message was not deleted and will come again: %s", failed.get("Message"))

    async def aclose(self) -> None:
        """Deletes what was made here. That one of the two is gone already keeps neither the other nor the end."""
        try:
            if self.dead_url is not None:
                await self._drop(self.url)
                await self._drop(self.dead_url, keep_messages=True)
        finally:
            await self._stack.aclose()

    async def _drop(self, url: str, keep_messages: bool = False) -> None:
        try:
            held = await self._held(url) if keep_messages else 0
            if held:
                log.warning("%d messages that nobody could use stay in %s", held, url)
            else:
                await self._sqs.delete_queue(QueueUrl=url)
        except AWS_ERRORS as error:
            log.warning("the run's queue %s could not be deleted: %s", url, error)

    async def _held(self, url: str) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        reply = await self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)
        return sum(int(reply["Attributes"][name]) for name in names)


def queue_name(run_id: str) -> str:
    """A name that SQS takes: 80 characters at most, and room for the dead-letter queue's suffix."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", f"rollout-{run_id}")
    if len(name) > 70 or name != f"rollout-{run_id}":
        name = f"{name[:60]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
    return name


async def _create(sqs: Any, config: QueueConfig, run_id: str) -> tuple[str, str]:
    name = queue_name(run_id)
    kept = {"MessageRetentionPeriod": str(_RETENTION_S)}
    dead_url = await _create_one(sqs, f"{name}-dlq", kept)
    reply = await sqs.get_queue_attributes(QueueUrl=dead_url, AttributeNames=["QueueArn"])
    redrive = {"deadLetterTargetArn": reply["Attributes"]["QueueArn"], "maxReceiveCount": config.max_receives}
    attributes = {**kept, "VisibilityTimeout": str(config.visibility_s), "RedrivePolicy": json.dumps(redrive)}
    return await _create_one(sqs, name, attributes), dead_url


async def _create_one(sqs: Any, name: str, attributes: dict[str, str], pause_s: float = 5.0) -> str:
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(_deleted_recently),
        stop=stop_after_delay(_NAME_BLOCKED_S),
        wait=wait_fixed(pause_s),
        before_sleep=lambda _: log.warning("the name %s is blocked for a minute after its deletion: waiting", name),
        reraise=True,
    ):
        with attempt:
            return str((await sqs.create_queue(QueueName=name, Attributes=attributes))["QueueUrl"])
    raise AssertionError("unreachable")


def _deleted_recently(error: BaseException) -> bool:
    return isinstance(error, ClientError) and aws.code_of(error).endswith("QueueDeletedRecently")
