"""Collect rollouts with boto3 in threads, as most would at first.

It invokes at the rate, receives from one queue, gets each announced object without decoding it, and stops each
session. It retries nothing, finds no lost announcement and checks nothing.
"""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config
from harness import Receive, Work, main, measure

THREADS, RECEIVERS = 64, 4


class Reference:
    def __init__(self, work: Work) -> None:
        config = Config(max_pool_connections=2 * THREADS)
        services = ("bedrock-agentcore", "s3", "sqs")
        self._runtime, self._s3, self._sqs = (boto3.client(name, "us-east-1", config=config) for name in services)
        self._arn, self._rate = work["arn"], work["rate"]
        self._queue = self._sqs.create_queue(QueueName="reference")["QueueUrl"]
        self._target = {"bucket": "results", "prefix": "", "queue_url": self._queue}
        self._due = time.monotonic()
        self._lock = threading.Lock()

    async def step(self, prefix: str, rollouts: int, receive: Receive) -> None:
        await asyncio.to_thread(self._collect, {f"{prefix}-{number}.0" for number in range(rollouts)}, receive)

    def _collect(self, missing: set[str], receive: Receive) -> None:
        with ThreadPoolExecutor(THREADS) as callers, ThreadPoolExecutor(RECEIVERS) as receivers:
            done = [receivers.submit(self._receive, missing, callers, receive) for _ in range(RECEIVERS)]
            for rollout_id in sorted(missing):
                self._wait()
                callers.submit(self._invoke, rollout_id)
            for each in done:
                each.result()

    def _invoke(self, rollout_id: str) -> None:
        ids = {"run_id": "reference", "step": 0, "task_id": rollout_id[:-2], "rollout_id": rollout_id, "attempt": 1}
        session_id = f"{rollout_id:>40}"
        body = json.dumps({"_rollout": {**ids, "session_id": session_id, "result": self._target}})
        self._runtime.invoke_agent_runtime(agentRuntimeArn=self._arn, runtimeSessionId=session_id, payload=body)

    def _receive(self, missing: set[str], callers: ThreadPoolExecutor, receive: Receive) -> None:
        while missing:
            reply = self._sqs.receive_message(QueueUrl=self._queue, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            if messages := reply.get("Messages", []):
                for message in messages:
                    callers.submit(self._take, key_of(message["Body"]), missing, receive)
                receipts = [{"Id": m["MessageId"], "ReceiptHandle": m["ReceiptHandle"]} for m in messages]
                self._sqs.delete_message_batch(QueueUrl=self._queue, Entries=receipts)

    def _take(self, key: str, missing: set[str], receive: Receive) -> None:
        assert self._s3.get_object(Bucket="results", Key=key)["Body"].read()
        rollout_id = key.rpartition("/")[2]
        receive(rollout_id)
        missing.discard(rollout_id)
        self._wait()
        self._runtime.stop_runtime_session(agentRuntimeArn=self._arn, runtimeSessionId=f"{rollout_id:>40}")

    def _wait(self) -> None:
        """Wait for this call's turn. Invokes and stops share the rate."""
        with self._lock:
            self._due = max(self._due + 1 / self._rate, time.monotonic())
            due = self._due
        time.sleep(max(0.0, due - time.monotonic()))


def key_of(announcement: str) -> str:
    """Return the key that an announcement in the format of S3's event notifications names."""
    return str(json.loads(announcement)["Records"][0]["s3"]["object"]["key"])


async def collect(work: Work) -> None:
    await measure(work, Reference(work).step)


if __name__ == "__main__":
    main(collect)
