"""SQS blocks the name of a deleted queue for a minute. A run that restarts within that minute waits."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from rollout_backend.collect import queue
from tests.simulation.clock import in_virtual_time


class Sqs:
    """Refuses a few calls. The emulators in the tests never do."""

    def __init__(self, code: str, times: int) -> None:
        self.code, self.times = code, times

    async def create_queue(self, QueueName: str, Attributes: dict[str, str]) -> dict[str, Any]:
        if self.times:
            self.times -= 1
            raise ClientError({"Error": {"Code": self.code}}, "CreateQueue")
        return {"QueueUrl": f"https://sqs/{QueueName}"}


@pytest.mark.parametrize("code", ["RequestThrottled", "ThrottlingException"])
@in_virtual_time
async def test_throttled_creation_is_retried(code):
    assert await queue._create_one(Sqs(code, times=3), "rollout-a", {}) == "https://sqs/rollout-a"


@in_virtual_time
async def test_a_blocked_name_is_retried(caplog):
    sqs = Sqs("AWS.SimpleQueueService.QueueDeletedRecently", times=3)
    assert await queue._create_one(sqs, "rollout-a", {}) == "https://sqs/rollout-a"
    assert "queue rollout-a cannot be created yet (its name is blocked" in caplog.text


@in_virtual_time
async def test_the_wait_for_a_blocked_name_ends():
    sqs = Sqs("AWS.SimpleQueueService.QueueDeletedRecently", times=1000)
    with pytest.raises(ClientError):
        await queue._create_one(sqs, "rollout-a", {})
