"""Collect rollouts with no more than what AWS and a run's promises demand: a floor.

Each call is signed and sent over a kept connection. Each session has a key for the gateway, and is on record before
its invoke, when its agent has accepted, before its stop and after it. Each result is decoded, its seal is verified,
and it is stored. The functions are this package's, called one after another: nothing is retried, paced, counted or
reported, and no fault is handled.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from boto3_threads import key_of
from botocore.credentials import Credentials
from harness import Receive, Work, main, measure
from load_generator import Connection
from multidict import CIMultiDict

from agent_wrapper.contract import REQUEST_FIELD, ResultTarget, Rollout, RolloutRequest, Sampling
from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.aws.repeated_call import Request, authorize
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.serving.run_secret import model_endpoint
from rollout_backend.run.step.in_flight import InFlightAttempt, InFlightLog, StepFiles

RUN, STEP, WORK_S = "checked", 0, 3600.0
GATEWAY = "http://127.0.0.1:9"  # for the agents, which call no model here
RECEIVERS = 4


class Reference:
    def __init__(self, work: Work) -> None:
        self._work, self._host, self._folder = work, urlsplit(work["url"]), Path(work["folder"])
        self._idle: list[Connection] = []
        self._arn = quote(work["arn"], safe="")
        self._sealer, self._log = Sealer(work["secret"]), InFlightLog(StepFiles(self._folder / "sessions"))
        self._credentials = Credentials("test", "test")

    async def step(self, prefix: str, rollouts: int, receive: Receive) -> None:
        self._queue = json.loads(await self._sqs("CreateQueue", QueueName="checked"))["QueueUrl"]
        self._missing = {f"{prefix}-{number}.0" for number in range(rollouts)}
        began, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for _ in range(RECEIVERS):
                group.create_task(self._receive(group, receive))
            for number, rollout_id in enumerate(sorted(self._missing)):
                if (early := began + number / self._work["rate"] - loop.time()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self._invoke(rollout_id))

    async def _invoke(self, rollout_id: str) -> None:
        session, now = f"{rollout_id:>40}", time.time()
        ids = {"run_id": RUN, "step": STEP, "rollout_id": rollout_id, "attempt": 1, "session_id": session}
        claims = SessionClaims(**ids, sampling=Sampling(), expires_at=now + WORK_S)
        request = RolloutRequest(
            **ids,
            task_id=rollout_id[:-2],
            endpoint=model_endpoint(GATEWAY, "scripted", self._work["secret"], claims),
            sampling=claims.sampling,
            deadline=now + WORK_S,
            remaining_s=WORK_S,
            result=ResultTarget(bucket="results", queue_url=self._queue),
        )
        body = json.dumps({REQUEST_FIELD: request.model_dump(mode="json")}).encode()
        self._log.record_invoked(STEP, session)
        await self._runtime("invocations", session, body)
        accepted = InFlightAttempt(
            session_id=session, rollout_id=rollout_id, attempt=1, began=now, deadline=now + WORK_S
        )
        self._log.record_running(STEP, accepted)

    async def _receive(self, group: asyncio.TaskGroup, receive: Receive) -> None:
        while self._missing:
            asked = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": 1}
            reply = json.loads(await self._sqs("ReceiveMessage", QueueUrl=self._queue, **asked))
            if messages := reply.get("Messages", []):
                for message in messages:
                    group.create_task(self._take(key_of(message["Body"]), receive))
                receipts = [{"Id": m["MessageId"], "ReceiptHandle": m["ReceiptHandle"]} for m in messages]
                await self._sqs("DeleteMessageBatch", QueueUrl=self._queue, Entries=receipts)

    async def _take(self, key: str, receive: Receive) -> None:
        rollout_id, result = key.rpartition("/")[2], await self._http("s3", "GET", f"/results/{key}")
        session = f"{rollout_id:>40}"
        self._sealer.check(Rollout.decode(result))
        write_file(self._folder / "rollouts" / rollout_id, result)
        receive(rollout_id)
        self._missing.discard(rollout_id)
        self._log.record_closed(STEP, session)
        await self._runtime("stopruntimesession", session)
        self._log.record_stopped(STEP, session)

    async def _runtime(self, path: str, session: str, body: bytes = b"") -> bytes:
        headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": session}
        path = f"/runtimes/{self._arn}/{path}?qualifier=DEFAULT"
        return await self._http("bedrock-agentcore", "POST", path, headers, body)

    async def _sqs(self, operation: str, **arguments: Any) -> bytes:
        headers = {"X-Amz-Target": f"AmazonSQS.{operation}", "Content-Type": "application/x-amz-json-1.0"}
        return await self._http("sqs", "POST", "/", headers, json.dumps(arguments).encode())

    async def _http(
        self, service: str, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        signed: CIMultiDict[str] = CIMultiDict({"Host": self._host.netloc, **(headers or {})})
        request = Request(method, self._work["url"] + path, signed, body, {})
        authorize(request, self._credentials, "s3v4" if service == "s3" else "v4", service, "us-east-1")
        lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
        head = f"{method} {path} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        connection = self._idle.pop() if self._idle else await Connection.open(self._host.hostname, self._host.port)
        answer = await connection.call(head.encode() + body)
        self._idle.append(connection)
        return answer.partition(b"\r\n\r\n")[2]


async def collect(work: Work) -> None:
    await measure(work, Reference(work).step)


if __name__ == "__main__":
    main(collect)
