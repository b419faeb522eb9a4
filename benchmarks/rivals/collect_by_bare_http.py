"""Collect rollouts with calls that are nothing but HTTP: what asyncio allows. The argument is the work, as JSON.

It sends the bytes of each call and reads those of the answer, over kept connections. It signs, decodes, checks and
retries nothing, and AWS would refuse its calls. The calls are those of `collect_by_boto3.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any
from urllib.parse import quote, urlsplit

from collect_by_boto3 import key_of
from http_client import Connection
from spent import Step, call

RECEIVERS = 4


class Reference:
    """Collects steps. A subclass may make other payloads, sign the calls and check the results."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work, self._host = work, urlsplit(work["url"])
        self._idle: list[Connection] = []
        self._arn = quote(work["arn"], safe="")

    async def collect(self, prefix: str, rollouts: int, step: Step | None) -> None:
        self._queue = json.loads(await self._sqs("CreateQueue", QueueName="bare"))["QueueUrl"]
        self._missing = {f"{prefix}-{number}.0" for number in range(rollouts)}
        began, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for _ in range(RECEIVERS):
                group.create_task(self._receive(group, step))
            for number, rollout_id in enumerate(sorted(self._missing)):
                if (early := began + number / self._work["rate"] - loop.time()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self.invoke(rollout_id))

    async def invoke(self, rollout_id: str) -> None:
        await self._runtime("invocations", rollout_id, self.payload(rollout_id))

    def payload(self, rollout_id: str) -> bytes:
        ids = {"run_id": "bare", "step": 0, "task_id": rollout_id[:-2], "rollout_id": rollout_id, "attempt": 1}
        target = {"bucket": "results", "prefix": "", "queue_url": self._queue}
        request = {"_rollout": {**ids, "session_id": f"{rollout_id:>40}", "result": target}}
        return json.dumps(request).encode()

    async def _receive(self, group: asyncio.TaskGroup, step: Step | None) -> None:
        while self._missing:
            asked = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": 1}
            reply = json.loads(await self._sqs("ReceiveMessage", QueueUrl=self._queue, **asked))
            if messages := reply.get("Messages", []):
                for message in messages:
                    group.create_task(self._take(key_of(message["Body"]), step))
                receipts = [{"Id": m["MessageId"], "ReceiptHandle": m["ReceiptHandle"]} for m in messages]
                await self._sqs("DeleteMessageBatch", QueueUrl=self._queue, Entries=receipts)

    async def _take(self, key: str, step: Step | None) -> None:
        rollout_id = key.rpartition("/")[2]
        self.accept(rollout_id, await self._http("s3", "GET", f"/results/{key}"))
        if step is not None:
            step.receive(rollout_id)
        self._missing.discard(rollout_id)
        await self.stop(rollout_id)
        if step is not None:
            step.close_one()

    def accept(self, rollout_id: str, result: bytes) -> None:
        assert result

    async def stop(self, rollout_id: str) -> None:
        await self._runtime("stopruntimesession", rollout_id)

    async def _runtime(self, path: str, rollout_id: str, body: bytes = b"") -> bytes:
        session = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": f"{rollout_id:>40}"}
        path = f"/runtimes/{self._arn}/{path}?qualifier=DEFAULT"
        return await self._http("bedrock-agentcore", "POST", path, session, body)

    async def _sqs(self, operation: str, **arguments: Any) -> bytes:
        headers = {"X-Amz-Target": f"AmazonSQS.{operation}", "Content-Type": "application/x-amz-json-1.0"}
        return await self._http("sqs", "POST", "/", headers, json.dumps(arguments).encode())

    def sign(self, service: str, method: str, path: str, headers: dict[str, str], body: bytes) -> dict[str, str]:
        return headers

    async def _http(
        self, service: str, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        headers = self.sign(service, method, path, headers or {}, body)
        if not self._idle:
            assert self._host.hostname is not None
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, self._host.hostname, self._host.port)
        else:
            connection = self._idle.pop()
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host.netloc}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        answer = await connection.call(head.encode() + body)
        self._idle.append(connection)
        return answer.partition(b"\r\n\r\n")[2]


async def main(reference: Reference, work: dict[str, Any]) -> None:
    await reference.collect("warm", work["warm_up"], None)
    call(work["url"], "reset")
    step = Step(work["core"])
    await reference.collect("task", work["rollouts"], step)
    step.print()


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    asyncio.run(main(Reference(work), work))
