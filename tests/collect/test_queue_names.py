"""SQS blocks the name of a deleted queue for a minute: a run that is started again within it waits."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from rollout_backend.collect import queue


class Sqs:
    """Refuses a few times, as no emulator in the tests does."""

    def __init__(self, code: str, times: int) -> None:
        self.code, self.times = code, times

    async def create_queue(self, QueueName: str, Attributes: dict[str, str]) -> dict[str, Any]:
        if self.times:
            self.times -= 1
            raise ClientError({"Error": {"Code": self.code}}, "CreateQueue")
        return {"QueueUrl": f"https://sqs/{QueueName}"}


async def test_a_blocked_name_is_waited_for(caplog):
    sqs = Sqs("AWS.SimpleQueueService.QueueDeletedRecently", times=3)
    assert await queue._create_one(sqs, "rollout-a", {}, pause_s=0.01) == "https://sqs/rollout-a"
    assert "rollout-a is blocked" in caplog.text


async def test_another_refusal_is_not():
    sqs = Sqs("AccessDenied", times=3)
    with pytest.raises(ClientError):
        await queue._create_one(sqs, "rollout-a", {}, pause_s=0.01)
    assert sqs.times == 2


async def test_the_wait_has_an_end(monkeypatch):
    monkeypatch.setattr(queue, "_NAME_BLOCKED_S", 0.05)
    sqs = Sqs("AWS.SimpleQueueService.QueueDeletedRecently", times=1000)
    with pytest.raises(ClientError):
        await queue._create_one(sqs, "rollout-a", {}, pause_s=0.01)
