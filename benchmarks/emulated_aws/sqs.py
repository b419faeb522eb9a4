"""SQS: standard queues with visibility timeouts and long polls, by the JSON protocol."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import json
import random
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from emulated_aws.http_server import Answer, Request, json_response

ACCOUNT = "000000000000"
REGION = "us-east-1"


@dataclass(slots=True)
class Message:
    id: str
    body: str
    sent_at: float
    receives: int = 0
    receipt: str = ""
    visible_at: float = 0.0  # seconds of the monotonic clock, while it is hidden


@dataclass
class Queue:
    """Messages are received in the order in which they were sent. There is no dead-letter queue."""

    url: str
    visibility_s: float = 30.0
    visible: OrderedDict[str, Message] = field(default_factory=OrderedDict)
    hidden: dict[str, Message] = field(default_factory=dict)  # by receipt
    due: list[tuple[float, str]] = field(default_factory=list)  # a heap of when hidden messages are visible again
    waiting: OrderedDict[int, Callable[[], None]] = field(default_factory=OrderedDict)  # long polls

    def send(self, body: str) -> Message:
        message = Message(str(uuid.UUID(int=random.getrandbits(128))), body, time.time())
        self.visible[message.id] = message
        self.wake()
        return message

    def wake(self) -> None:
        while self.visible and self.waiting:
            self.waiting.popitem(last=False)[1]()

    def take(self, limit: int, visibility_s: float) -> list[Message]:
        taken = []
        while self.visible and len(taken) < limit:
            message = self.visible.popitem(last=False)[1]
            message.receives += 1
            message.receipt = f"{message.id}.{message.receives}"
            self.hidden[message.receipt] = message
            self.hide(message.receipt, visibility_s)
            taken.append(message)
        return taken

    def hide(self, receipt: str, seconds: float) -> None:
        message = self.hidden.get(receipt)
        if message is not None and seconds:
            message.visible_at = time.monotonic() + seconds
            heapq.heappush(self.due, (message.visible_at, receipt))
        elif message is not None:
            self._show(receipt)

    def delete(self, receipt: str) -> None:
        self.hidden.pop(receipt, None)

    def show_due(self) -> None:
        """Show the hidden messages that were not deleted in time."""
        now = time.monotonic()
        while self.due and self.due[0][0] <= now:
            at, receipt = heapq.heappop(self.due)
            if receipt in self.hidden and self.hidden[receipt].visible_at == at:
                self._show(receipt)

    def _show(self, receipt: str) -> None:
        message = self.hidden.pop(receipt)
        self.visible[message.id] = message
        self.wake()


class SqsError(Exception):
    pass


class Sqs:
    """Queues, by the JSON protocol."""

    def __init__(self, latency_s: float, calls: Counter[str]) -> None:
        self._latency_s = latency_s
        self._calls = calls
        self._queues: dict[str, Queue] = {}  # by name
        self._polls = itertools.count()

    def handle(self, request: Request, answer: Answer) -> None:
        operation = request.text(b"x-amz-target").partition(".")[2]
        self._calls[operation] += 1
        asked = json.loads(request.body or b"{}")
        try:
            if operation == "ReceiveMessage":
                self._receive(asked, answer)
                return
            if operation in ("CreateQueue", "GetQueueUrl"):
                found = self._find_or_create(operation, asked, request.text(b"host"))
            elif operation.endswith("Batch"):
                queue, one = self._queue(asked), getattr(self, f"_{_snake(operation.removesuffix('Batch'))}")
                made = [{"Id": entry["Id"], **one(queue, entry)} for entry in asked["Entries"]]
                found = {"Successful": made, "Failed": []}
            else:
                found = getattr(self, f"_{_snake(operation)}")(self._queue(asked), asked)
        except SqsError as error:
            answer(
                json_response(400, {"__type": f"com.amazonaws.sqs#{error}", "message": str(error)}), self._latency_s
            )
        else:
            answer(json_response(200, found), self._latency_s)

    def send(self, url: str, body: str) -> None:
        """Send a message of an agent in this process, which costs no call on the wire."""
        self._queue({"QueueUrl": url}).send(body)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            for queue in self._queues.values():
                queue.show_due()

    def _queue(self, asked: dict[str, Any]) -> Queue:
        queue = self._queues.get(asked["QueueUrl"].rpartition("/")[2])
        if queue is None:
            raise SqsError("QueueDoesNotExist")
        return queue

    def _find_or_create(self, operation: str, asked: dict[str, Any], host: str) -> dict[str, Any]:
        name = asked["QueueName"]
        if operation == "CreateQueue" and name not in self._queues:
            visibility_s = float(asked.get("Attributes", {}).get("VisibilityTimeout", 30))
            self._queues[name] = Queue(f"http://{host}/{ACCOUNT}/{name}", visibility_s)
        return {"QueueUrl": self._queue({"QueueUrl": name}).url}

    def _delete_queue(self, queue: Queue, asked: dict[str, Any]) -> dict[str, Any]:
        del self._queues[queue.url.rpartition("/")[2]]
        return {}

    def _get_queue_attributes(self, queue: Queue, asked: dict[str, Any]) -> dict[str, Any]:
        attributes = {
            "QueueArn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:{queue.url.rpartition('/')[2]}",
            "ApproximateNumberOfMessages": str(len(queue.visible)),
            "ApproximateNumberOfMessagesNotVisible": str(len(queue.hidden)),
            "ApproximateNumberOfMessagesDelayed": "0",
            "VisibilityTimeout": f"{queue.visibility_s:g}",
        }
        names = asked.get("AttributeNames", [])
        wanted = attributes if "All" in names else attributes.keys() & names  # an attribute that is unset is left out
        return {"Attributes": {name: attributes[name] for name in wanted}}

    def _send_message(self, queue: Queue, asked: dict[str, Any]) -> dict[str, Any]:
        message = queue.send(asked["MessageBody"])
        return {"MessageId": message.id, "MD5OfMessageBody": _md5(message.body)}

    def _receive(self, asked: dict[str, Any], answer: Answer) -> None:
        queue, poll = self._queue(asked), next(self._polls)
        limit = int(asked.get("MaxNumberOfMessages", 1))
        visibility_s = float(asked.get("VisibilityTimeout", queue.visibility_s))
        timer: asyncio.TimerHandle | None = None

        def reply() -> None:
            queue.waiting.pop(poll, None)
            if timer is not None:
                timer.cancel()
            messages = queue.take(limit, visibility_s)
            answer(
                json_response(200, {"Messages": [_received(each) for each in messages]} if messages else {}),
                latency_s,
            )

        latency_s, wait_s = self._latency_s, float(asked.get("WaitTimeSeconds", 0))
        if wait_s and not queue.visible:
            timer = asyncio.get_running_loop().call_later(wait_s, reply)
            queue.waiting[poll] = reply
        else:
            reply()

    def _delete_message(self, queue: Queue, asked: dict[str, Any]) -> dict[str, Any]:
        queue.delete(asked["ReceiptHandle"])
        return {}

    def _change_message_visibility(self, queue: Queue, asked: dict[str, Any]) -> dict[str, Any]:
        queue.hide(asked["ReceiptHandle"], float(asked["VisibilityTimeout"]))
        return {}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _received(message: Message) -> dict[str, Any]:
    return {
        "MessageId": message.id,
        "ReceiptHandle": message.receipt,
        "MD5OfBody": _md5(message.body),
        "Body": message.body,
        "Attributes": {
            "SentTimestamp": str(int(message.sent_at * 1000)),
            "ApproximateReceiveCount": str(message.receives),
        },
    }
