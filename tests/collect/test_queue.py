"""The queue of announcements over a real SQS: made and deleted with the run, or used as it is."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_backend.collect.queue import AWS_ERRORS, AnnouncementQueue, Message, queue_name
from rollout_backend.errors import PreflightError

run_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)


async def send(sqs, queue: AnnouncementQueue, *bodies: str) -> None:
    for start in range(0, len(bodies), 10):
        entries = [{"Id": str(i), "MessageBody": body} for i, body in enumerate(bodies[start : start + 10])]
        await sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)


async def receive_all(queue: AnnouncementQueue) -> list[Message]:
    found: list[Message] = []
    while messages := await queue.receive():
        found += messages
    return found


async def names_of(sqs, run_id: str) -> set[str]:
    reply = await sqs.list_queues(QueueNamePrefix=queue_name(run_id))
    return {url.rpartition("/")[2] for url in reply.get("QueueUrls", ())}


async def reappear(sqs, queue: AnnouncementQueue, message: Message) -> None:
    """Ends a message's time of being hidden now."""
    await sqs.change_message_visibility(QueueUrl=queue.url, ReceiptHandle=message.receipt, VisibilityTimeout=0)


# --- names ------------------------------------------------------------------------------------------------


@settings(max_examples=300, derandomize=True, deadline=None)
@given(run_ids)
def test_a_name_is_one_that_sqs_takes_with_room_for_the_dead_letters(run_id):
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,80}", f"{queue_name(run_id)}-dlq")


@settings(max_examples=300, derandomize=True, deadline=None)
@given(run_ids, run_ids)
def test_two_runs_never_share_a_queue(one, other):
    assert (queue_name(one) == queue_name(other)) == (one == other)


def test_runs_whose_names_sqs_would_take_for_one_are_told_apart():
    long = "r" * 120
    assert len({queue_name(name) for name in ("a.b", "a-b", "a_b", long, long + "x")}) == 5
    assert queue_name("my-run") == "rollout-my-run"


# --- made and deleted -------------------------------------------------------------------------------------


async def test_a_queue_is_made_with_its_dead_letter_queue_and_both_are_deleted(open_queue, sqs, run_id):
    queue = await open_queue(close=False, visibility_s=33, max_receives=4)
    name = queue_name(run_id)
    assert await names_of(sqs, run_id) == {name, f"{name}-dlq"}
    made = (await sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"]))["Attributes"]
    assert (made["VisibilityTimeout"], made["MessageRetentionPeriod"]) == ("33", str(14 * 24 * 3600))
    redrive = json.loads(made["RedrivePolicy"])
    assert int(redrive["maxReceiveCount"]) == 4
    assert redrive["deadLetterTargetArn"].endswith(f":{name}-dlq")
    await queue.aclose()
    assert await names_of(sqs, run_id) == set()


async def test_a_dead_letter_queue_with_evidence_in_it_stays(open_queue, sqs, run_id, caplog):
    queue = await open_queue(close=False, max_receives=1)
    await send(sqs, queue, "nobody can use this")
    [message] = await queue.receive()
    await reappear(sqs, queue, message)
    assert await queue.receive() == []  # it has gone where the dead letters go
    await queue.aclose()
    name = queue_name(run_id)
    assert await names_of(sqs, run_id) == {f"{name}-dlq"}
    assert "1 messages that nobody could use stay in" in caplog.text
    url = (await sqs.get_queue_url(QueueName=f"{name}-dlq"))["QueueUrl"]
    [kept] = (await sqs.receive_message(QueueUrl=url))["Messages"]
    assert kept["Body"] == "nobody can use this"


async def test_a_queue_of_the_users_is_used_as_it_is_and_stays(open_queue, sqs, run_id):
    url = (await sqs.create_queue(QueueName=f"mine-{run_id}"))["QueueUrl"]
    queue = await open_queue(close=False, url=url)
    assert queue.url == url
    assert await names_of(sqs, run_id) == set()
    await send(sqs, queue, "a")
    [message] = await queue.receive()
    assert message.body == "a"
    await queue.aclose()
    assert (await sqs.get_queue_url(QueueName=f"mine-{run_id}"))["QueueUrl"] == url


async def test_a_queue_that_is_not_there_is_found_out_at_once(open_queue, where):
    with pytest.raises(PreflightError, match=r"queue .*no-such-queue does not exist. Create it, or mend queue\.url"):
        await open_queue(url=f"{where.endpoint_url}/123456789012/no-such-queue")


@pytest.mark.parametrize("url", [None, "http://127.0.0.1/123456789012/mine"])
async def test_an_sqs_that_does_not_answer_is_found_out_at_once(open_queue, nowhere, url):
    with pytest.raises(PreflightError, match=r"cannot be reached.*aws\.endpoint_url"):
        await open_queue(nowhere, url=url)


async def test_opened_twice_by_one_run_it_is_one_queue(open_queue, sqs):
    first, second = await open_queue(close=False), await open_queue()
    assert first.url == second.url
    await first._stack.aclose()


@pytest.mark.parametrize("gone", ["", "-dlq"])
async def test_a_queue_that_somebody_deleted_does_not_keep_the_other_from_being_deleted(
    open_queue, sqs, run_id, caplog, gone
):
    queue = await open_queue(close=False)
    url = (await sqs.get_queue_url(QueueName=queue_name(run_id) + gone))["QueueUrl"]
    await sqs.delete_queue(QueueUrl=url)
    await queue.aclose()
    assert await names_of(sqs, run_id) == set()
    assert "could not be deleted" in caplog.text


# --- messages ---------------------------------------------------------------------------------------------


async def test_a_message_says_when_it_was_sent(open_queue, sqs):
    queue = await open_queue()
    before = time.time()
    await send(sqs, queue, "hello")
    [message] = await queue.receive()
    assert message.body == "hello"
    assert before - 1 < message.sent_at < time.time() + 1
    assert message.message_id
    assert message.receipt


async def test_an_empty_queue_gives_nothing(open_queue):
    assert await (await open_queue(wait_s=0)).receive() == []


async def test_a_receive_waits_for_the_first_message(open_queue, sqs):
    queue = await open_queue(wait_s=20)
    receiving = asyncio.create_task(queue.receive())
    await send(sqs, queue, "late")
    async with asyncio.timeout(10):
        assert [message.body for message in await receiving] == ["late"]


async def test_more_than_a_batch_is_received_and_deleted_whole(open_queue, sqs):
    queue = await open_queue(wait_s=0)
    bodies = [f"message {i}" for i in range(23)]
    await send(sqs, queue, *bodies)
    messages = await receive_all(queue)
    assert sorted(message.body for message in messages) == sorted(bodies)
    await queue.delete(messages)
    for message in messages:
        with pytest.raises(ClientError):  # there is nothing left to make visible
            await reappear(sqs, queue, message)
    assert await receive_all(queue) == []


async def test_a_message_is_hidden_while_it_is_dealt_with_and_comes_again(open_queue, sqs):
    queue = await open_queue(wait_s=0)
    await send(sqs, queue, "a")
    [first] = await queue.receive()
    assert await queue.receive() == []
    await reappear(sqs, queue, first)
    [second] = await queue.receive()
    assert (second.message_id, second.body) == (first.message_id, first.body)


async def test_nothing_is_deleted_where_there_is_nothing_to_delete(open_queue):
    await (await open_queue()).delete([])


async def test_a_message_that_could_not_be_deleted_is_told_and_the_others_are_deleted(open_queue, sqs, caplog):
    queue = await open_queue(wait_s=0)
    await send(sqs, queue, "a")
    [message] = await queue.receive()
    forged = Message(body="", receipt="no such receipt", message_id="x", sent_at=0.0)
    with caplog.at_level(logging.WARNING):
        await queue.delete([forged, message])
    assert "will come again" in caplog.text
    with pytest.raises(ClientError):
        await reappear(sqs, queue, message)


async def test_a_queue_that_is_gone_is_an_error_of_aws(open_queue, sqs):
    queue = await open_queue()
    await send(sqs, queue, "a")
    [message] = await queue.receive()
    await sqs.delete_queue(QueueUrl=queue.url)
    with pytest.raises(AWS_ERRORS):
        await queue.receive()
    with pytest.raises(AWS_ERRORS):
        await queue.delete([message])
