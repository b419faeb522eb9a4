"""The announcement queue on a local SQS: created and deleted with the run, or given and kept."""

import json
import logging
import re
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.config import StorageConfig
from rollout_backend.run.collect.queue import (
    AWS_ERRORS,
    AnnouncementQueue,
    Message,
    _create_one,
    _messages,
    queue_name,
)
from rollout_backend.testing.fault_proxy import Fault, Rule
from tests.simulation.clock import in_virtual_time

run_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
STORAGE = StorageConfig(bucket="bucket")
ITEM = {"Body": "b", "ReceiptHandle": "r", "MessageId": "m"}  # of an answer to ReceiveMessage
places = st.sampled_from([STORAGE, StorageConfig(bucket="other"), StorageConfig(bucket="bucket", prefix="team/")])


async def send(sqs, queue: AnnouncementQueue, *bodies: str) -> None:
    for start in range(0, len(bodies), 10):
        entries = [{"Id": str(i), "MessageBody": body} for i, body in enumerate(bodies[start : start + 10])]
        await sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)


async def receive_all(queue: AnnouncementQueue) -> list[Message]:
    found: list[Message] = []
    while messages := await queue.receive():
        found += messages
    return found


async def names_of(sqs, name: str) -> set[str]:
    reply = await sqs.list_queues(QueueNamePrefix=name)
    return {url.rpartition("/")[2] for url in reply.get("QueueUrls", ())}


async def reappear(sqs, queue: AnnouncementQueue, message: Message) -> None:
    """Make a received message visible again now."""
    await sqs.change_message_visibility(QueueUrl=queue.url, ReceiptHandle=message.receipt, VisibilityTimeout=0)


# --- names ------------------------------------------------------------------------------------------------


@given(run_ids)
def test_a_name_is_valid_for_sqs_with_the_dead_letter_suffix(run_id):
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,80}", f"{queue_name(STORAGE, run_id)}-dlq")


@given(st.tuples(places, run_ids), st.tuples(places, run_ids))
def test_two_runs_never_share_a_queue(one, other):
    assert (queue_name(*one) == queue_name(*other)) == (one == other)


# --- creation and deletion --------------------------------------------------------------------------------


async def test_a_queue_is_created_with_its_dead_letter_queue_and_both_are_deleted(open_queue, sqs, name):
    queue = await open_queue(close=False, visibility_s=33, max_receives=4)
    assert await names_of(sqs, name) == {name, f"{name}-dlq"}
    made = (await sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"]))["Attributes"]
    assert (made["VisibilityTimeout"], made["MessageRetentionPeriod"]) == ("33", str(14 * 24 * 3600))
    redrive = json.loads(made["RedrivePolicy"])
    assert int(redrive["maxReceiveCount"]) == 4
    assert redrive["deadLetterTargetArn"].endswith(f":{name}-dlq")
    await queue.aclose()
    assert await names_of(sqs, name) == set()


async def test_a_dead_letter_queue_with_messages_is_kept(open_queue, sqs, name, caplog):
    queue = await open_queue(close=False, max_receives=1)
    await send(sqs, queue, "malformed")
    [message] = await queue.receive()
    await reappear(sqs, queue, message)
    assert await queue.receive() == []  # it moved to the dead-letter queue
    await queue.aclose()
    assert await names_of(sqs, name) == {f"{name}-dlq"}
    assert "1 messages that could not be handled are kept in" in caplog.text
    url = (await sqs.get_queue_url(QueueName=f"{name}-dlq"))["QueueUrl"]
    [kept] = (await sqs.receive_message(QueueUrl=url))["Messages"]
    assert kept["Body"] == "malformed"


async def test_a_given_queue_is_used_unchanged_and_kept(open_queue, sqs, name):
    url = (await sqs.create_queue(QueueName=f"mine-{name}"))["QueueUrl"]
    queue = await open_queue(close=False, url=url)
    assert queue.url == url
    assert await names_of(sqs, name) == set()
    await send(sqs, queue, "a")
    [message] = await queue.receive()
    assert message.body == "a"
    await queue.aclose()
    assert (await sqs.get_queue_url(QueueName=f"mine-{name}"))["QueueUrl"] == url


async def test_an_existing_queue_with_other_attributes_is_used_unchanged(open_queue, sqs):
    first = await open_queue(close=False, visibility_s=33, max_receives=4)
    second = await open_queue(visibility_s=44, max_receives=5)
    assert (second.url, second.dead_url) == (first.url, first.dead_url)
    await send(sqs, second, "a")
    [message] = await second.receive()
    assert message.body == "a"
    await first._stack.aclose()


@pytest.mark.parametrize("gone", ["", "-dlq"])
async def test_a_deleted_queue_does_not_prevent_deleting_the_other(open_queue, sqs, name, caplog, gone):
    queue = await open_queue(close=False)
    url = (await sqs.get_queue_url(QueueName=name + gone))["QueueUrl"]
    await sqs.delete_queue(QueueUrl=url)
    await queue.aclose()
    assert await names_of(sqs, name) == set()
    assert "could not be deleted" in caplog.text


# --- messages ---------------------------------------------------------------------------------------------


async def test_more_messages_than_a_batch_are_received_and_deleted(open_queue, sqs):
    queue = await open_queue(wait_s=0)
    bodies = [f"message {i}" for i in range(23)]
    await send(sqs, queue, *bodies)
    messages = await receive_all(queue)
    assert sorted(message.body for message in messages) == sorted(bodies)
    await queue.delete(messages)
    for message in messages:
        with pytest.raises(ClientError):  # the message no longer exists
            await reappear(sqs, queue, message)
    assert await receive_all(queue) == []


async def test_a_message_that_cannot_be_deleted_is_logged_and_the_others_are_deleted(open_queue, sqs, caplog):
    queue = await open_queue(wait_s=0)
    await send(sqs, queue, "a")
    [message] = await queue.receive()
    forged = Message(body="", receipt="no such receipt", message_id="x", sent_at=0.0)
    with caplog.at_level(logging.WARNING):
        await queue.delete([forged, message])
    assert "will be received again" in caplog.text
    with pytest.raises(ClientError):
        await reappear(sqs, queue, message)


async def test_a_truncated_answer_is_an_aws_error(faulty, proxy, open_queue):
    queue = await open_queue(faulty, wait_s=0)
    assert await queue.receive() == []
    for fault in (Fault.CUT_BODY, Fault.RESET_BODY, Fault.NO_LENGTH, Fault.TRUNCATE):
        proxy.rules = [Rule("sqs:ReceiveMessage", fault)]
        with pytest.raises(AWS_ERRORS):
            await queue.receive()


@pytest.mark.parametrize(
    "messages",
    [1, [{}], [{**ITEM, "Attributes": {"SentTimestamp": "now"}}]],
)
def test_an_answer_with_other_contents_is_an_aws_error(messages):
    with pytest.raises(AWS_ERRORS, match="is not one to ReceiveMessage"):
        _messages({"Messages": messages})


async def test_a_message_stays_hidden_while_it_is_extended(open_queue, sqs):
    queue = await open_queue(visibility_s=33, wait_s=1)
    await sqs.send_message(QueueUrl=queue.url, MessageBody="x")
    [message] = await queue.receive()
    sent, change = [], queue._change_visibility

    async def record(**call):
        sent.extend(call["Entries"])
        return await change(**call)

    queue._change_visibility = record
    await queue.extend_visibility([message])
    assert [(entry["ReceiptHandle"], entry["VisibilityTimeout"]) for entry in sent] == [(message.receipt, 33)]


# --- names that SQS blocks for a minute after a deletion ---------------------------------------------------


class Sqs:
    """Refuses a few calls. The emulators in the tests never do."""

    def __init__(self, code: str, times: int) -> None:
        self.code, self.times = code, times

    async def create_queue(self, QueueName: str, Attributes: dict[str, str]) -> dict[str, Any]:
        if self.times:
            self.times -= 1
            raise ClientError({"Error": {"Code": self.code}}, "CreateQueue")
        return {"QueueUrl": f"https://sqs/{QueueName}"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("RequestThrottled", "An error occurred"),
        ("ThrottlingException", "An error occurred"),
        ("AWS.SimpleQueueService.QueueDeletedRecently", "its name is blocked"),
    ],
)
@in_virtual_time
async def test_a_throttled_creation_and_a_blocked_name_are_retried(caplog, code, why):
    assert await _create_one(Sqs(code, times=3), "rollout-a", {}) == "https://sqs/rollout-a"
    assert f"queue rollout-a cannot be created yet ({why}" in caplog.text


@in_virtual_time
async def test_the_wait_for_a_blocked_name_ends():
    sqs = Sqs("AWS.SimpleQueueService.QueueDeletedRecently", times=1000)
    with pytest.raises(ClientError):
        await _create_one(sqs, "rollout-a", {})
