"""Measure how many calls the emulated AWS answers on one core, and its CPU time: `python benchmarks/ceilings.py`.

The stand-in must not be the bottleneck of `collection.py`. 64 connections each repeat a call as soon as it is
answered, without latencies. `gateway.py` measures the engine's stand-in, as the system without a gateway.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from collection import SECRET, Work
from common import HERE, arguments, cpu_s, kept_folder, serving, write
from emulated_aws import ACCOUNT, ARN, SESSION

from agent_wrapper.contract import REQUEST_FIELD
from rollout_backend.model.serving.server_process import free_port


class Caller(asyncio.Protocol):
    """Sends the next request as soon as the last one is answered."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self.answered = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 "):
            self.answered += 1
            self.transport.write(next(self._requests))


def calls() -> dict[str, Iterator[bytes]]:
    """Return the requests of each call without end."""
    host = f"Host: 127.0.0.1\r\nAuthorization: {'x' * 200}\r\nX-Amz-Date: 20260101T000000Z\r\n"

    def post(path: str, body: object, more: str) -> bytes:
        data = json.dumps(body).encode()
        return f"POST {path} HTTP/1.1\r\n{host}{more}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    def sqs(operation: str, **body: object) -> Iterator[bytes]:
        return itertools.repeat(post("/", body, f"X-Amz-Target: AmazonSQS.{operation}"))

    def runtime(operation: str, body: Callable[[str], object]) -> Iterator[bytes]:
        for number in itertools.count():
            yield post(f"/runtimes/{quote(ARN, safe='')}/{operation}", body(str(number)), f"{SESSION}: {number}")

    def request(number: str) -> object:
        target = {"bucket": "bucket", "prefix": "", "queue_url": url}
        ids = {"run_id": "r", "step": 0, "task_id": number, "rollout_id": f"{number}.0", "attempt": 1}
        return {REQUEST_FIELD: {**ids, "session_id": number, "result": target, "endpoint": "x" * 1000}}

    url = f"http://127.0.0.1/{ACCOUNT}/queue"
    messages = [{"Id": str(i), "MessageBody": "x" * 200} for i in range(10)]
    receipts = [{"Id": str(i), "ReceiptHandle": "x" * 40} for i in range(10)]
    put = f"PUT /bucket/key HTTP/1.1\r\n{host}Content-Length: 4\r\n\r\ndata".encode()
    return {
        "PutObject": itertools.repeat(put),
        "GetObject (4 B)": itertools.repeat(f"GET /bucket/key HTTP/1.1\r\n{host}\r\n".encode()),
        "CreateQueue": sqs("CreateQueue", QueueName="queue"),
        "SendMessageBatch (10)": sqs("SendMessageBatch", QueueUrl=url, Entries=messages),
        "ReceiveMessage (10)": sqs("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10),
        "DeleteMessageBatch (10)": sqs("DeleteMessageBatch", QueueUrl=url, Entries=receipts),
        "invoke, with its result": runtime("invocations", request),
        "stop": runtime("stopruntimesession", lambda number: {}),
    }


async def measure(seconds: float) -> list[dict[str, Any]]:
    """Return a row of the calls per second, and one of the CPU per call in microseconds."""
    cores, port, found = sorted(os.sched_getaffinity(0)), free_port(), []
    with kept_folder() as folder:
        work = {**vars(Work(0, agent_s=0.001)), "secret": SECRET, "port": port, "latencies_s": [0.0] * 3}
        argv = [sys.executable, str(HERE / "emulator.py"), json.dumps(work)]
        async with serving(argv, port, folder / "emulator.log", cores[-1]) as pid:
            os.sched_setaffinity(0, cores[:-1] or cores)
            loop = asyncio.get_running_loop()
            for name, requests in calls().items():
                before, began, callers = cpu_s(pid), loop.time(), []
                for _ in range(64):
                    made = await loop.create_connection(lambda each=requests: Caller(each), "127.0.0.1", port)
                    callers.append(made[1])
                await asyncio.sleep(seconds)
                answered, took = sum(caller.answered for caller in callers), loop.time() - began
                for caller in callers:
                    caller.transport.abort()
                found.append((name, answered / took, (cpu_s(pid) - before) / answered * 1e6))
                print(f"{name:26s} {found[-1][1]:8.0f} calls/s  {found[-1][2]:6.1f} us of CPU per call", flush=True)
    return [
        {"system": system, **{each[0]: each[at] for each in found}}
        for at, system in ((1, "calls/s on one core"), (2, "CPU per call, µs"))
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    write(options.json, asyncio.run(measure(0.2 if options.smoke else 2.0)))


if __name__ == "__main__":
    main()
