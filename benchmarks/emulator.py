"""Emulate S3, SQS and AgentCore's data plane for load tests: `python benchmarks/emulator.py --port 9500`.

It speaks the wire protocols of boto3 and of this project's clients, on one port, and answers each call after a fixed
latency. A call takes effect when it arrives. A long poll is answered as soon as a message is visible, plus the
latency. Signatures are not checked.

The agents run in this process: an invoked agent works for some time, then stores a ready-made result and announces
it. `GET /_emulator/log` returns when each agent was invoked, published and stopped (seconds of the machine's
monotonic clock), and the number of calls by operation. `POST /_emulator/reset` forgets all that.

`python benchmarks/emulator.py --ceiling` measures how many calls per second it answers on one core, and its CPU time
per call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from emulated_aws.agentcore import ARN, SESSION, AgentCore
from emulated_aws.cloud import Cloud
from emulated_aws.ready_made import ReadyMadeResults
from emulated_aws.sqs import ACCOUNT
from emulated_aws.toolkit_agents import ToolkitAgents
from rivals.spent import call

from agent_wrapper.contract import REQUEST_FIELD

AGENTS = {"ours": AgentCore, "toolkit": ToolkitAgents}


class Emulator(Cloud):
    def __init__(self, options: Any) -> None:
        super().__init__(s3_s=options.s3_s, sqs_s=options.sqs_s)
        results = ReadyMadeResults(options.tokens, options.secret)
        self.agents = AGENTS[options.agents](self.s3, self.sqs, results, options, self.calls)

    def control(self, name: str) -> Any:
        if name == "reset":
            self.calls.clear()
            self.agents.reset()
        agents = self.agents
        log = {"invoked": agents.invoked, "stopped": agents.stopped, "published": agents.published}
        return {**log, **super().control(name)}


async def serve(port: int, options: Any) -> None:
    async with Emulator(options).serve(port):
        await asyncio.Event().wait()


def run(port: int, options: Any) -> None:
    gc.freeze()
    gc.disable()  # what it makes has no cycles, and a collection of 100,000 messages would take 0.1 s
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(port, options))


# --- its ceiling -------------------------------------------------------------------------------------------


class _Caller(asyncio.Protocol):
    """Sends the same request again as soon as it is answered."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self.answered = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._make())

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 "):
            self.answered += 1
            self._transport.write(self._make())


def _calls_of_a_run(port: int) -> dict[str, Callable[[], bytes]]:
    host = f"Host: 127.0.0.1:{port}\r\nAuthorization: {'x' * 200}\r\nX-Amz-Date: 20260101T000000Z\r\n"
    numbers = itertools.count()

    def post(path: str, body: object, more: str = "") -> bytes:
        data = json.dumps(body).encode()
        return f"POST {path} HTTP/1.1\r\n{host}{more}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def sqs(operation: str, **body: object) -> bytes:
        url = f"http://127.0.0.1:{port}/{ACCOUNT}/queue"
        return post("/", {"QueueUrl": url, **body}, f"X-Amz-Target: AmazonSQS.{operation}\r\n")

    def invoke() -> bytes:
        number = next(numbers)
        fields = {"run_id": "r", "step": 0, "task_id": f"t{number}", "rollout_id": f"t{number}.0", "attempt": 1}
        target = {"bucket": "bucket", "prefix": "", "queue_url": f"http://x/{ACCOUNT}/queue"}
        request = {**fields, "session_id": f"s{number}", "result": target, "endpoint": "x" * 1000}
        session = f"{SESSION.decode()}: s{number}\r\n"
        return post(f"/runtimes/{quote(ARN, safe='')}/invocations", {REQUEST_FIELD: request}, session)

    messages = [{"Id": str(i), "MessageBody": "x" * 200} for i in range(10)]
    receipts = [{"Id": str(i), "ReceiptHandle": "x" * 40} for i in range(10)]
    return {
        "PutObject": lambda: f"PUT /bucket/key HTTP/1.1\r\n{host}Content-Length: 4\r\n\r\ndata".encode(),
        "GetObject (4 B)": lambda: f"GET /bucket/key HTTP/1.1\r\n{host}\r\n".encode(),
        "CreateQueue": lambda: post("/", {"QueueName": "queue"}, "X-Amz-Target: AmazonSQS.CreateQueue\r\n"),
        "SendMessageBatch (10)": lambda: sqs("SendMessageBatch", Entries=messages),
        "ReceiveMessage (10)": lambda: sqs("ReceiveMessage", MaxNumberOfMessages=10),
        "DeleteMessageBatch (10)": lambda: sqs("DeleteMessageBatch", Entries=receipts),
        "invoke, with its result": invoke,
        "stop": lambda: post("/stop", {}, f"{SESSION.decode()}: s\r\n"),
    }


async def _measure(port: int, make: Callable[[], bytes], seconds: float) -> tuple[float, float]:
    """Return the calls per second, and the emulator's CPU seconds per call."""
    loop = asyncio.get_running_loop()
    callers = []
    cpu = call(f"http://127.0.0.1:{port}", "log")["cpu_s"]
    began = loop.time()
    transports = []
    for _ in range(64):
        transport, caller = await loop.create_connection(lambda: _Caller(make), "127.0.0.1", port)
        transports.append(transport)
        callers.append(caller)
    await asyncio.sleep(seconds)
    answered, took = sum(caller.answered for caller in callers), loop.time() - began
    for transport in transports:
        transport.abort()
    return answered / took, (call(f"http://127.0.0.1:{port}", "log")["cpu_s"] - cpu) / answered


async def _ceilings(port: int) -> dict[str, dict[str, float]]:
    """Measure each call, and print what it takes."""
    while True:
        with contextlib.suppress(OSError):
            call(f"http://127.0.0.1:{port}", "log")
            break
        await asyncio.sleep(0.05)
    found = {}
    for name, make in _calls_of_a_run(port).items():
        per_s, cpu_s = await _measure(port, make, 2.0)
        found[name] = {"calls_per_s": per_s, "cpu_us": cpu_s * 1e6}
        print(f"{name:26s} {per_s:8.0f} calls/s  {cpu_s * 1e6:6.0f} us CPU per call", flush=True)
    return found


def ceiling(port: int, tokens: int) -> dict[str, dict[str, float]]:
    quick = SimpleNamespace(
        s3_s=0.0, sqs_s=0.0, invoke_s=0.0, agent_s=0.001, spread=0.0, tokens=tokens, secret="s" * 32, agents="ours"
    )
    server = multiprocessing.get_context("spawn").Process(target=run, args=(port, quick), daemon=True)
    server.start()
    cores = sorted(os.sched_getaffinity(0))
    assert server.pid is not None
    os.sched_setaffinity(server.pid, cores[-1:])
    os.sched_setaffinity(0, cores[:-1] or cores)
    try:
        return asyncio.run(_ceilings(port))
    finally:
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9500)
    parser.add_argument("--s3-s", type=float, default=0.03, help="latency of S3 in seconds")
    parser.add_argument("--sqs-s", type=float, default=0.01)
    parser.add_argument("--invoke-s", type=float, default=0.15, help="latency of invokes and stops")
    parser.add_argument("--agent-s", type=float, default=1.0, help="how long an agent works")
    parser.add_argument("--spread", type=float, default=0.5, help="agents take up to this part more or less")
    parser.add_argument("--tokens", type=int, default=1200, help="per result; 1,200 are 10 KB, 16,000 are 110 KB")
    parser.add_argument("--secret", default="s" * 32, help="the run's `gateway.secret`, which seals the results")
    parser.add_argument("--agents", choices=AGENTS, default="ours", help="agents with another project's wrapper")
    parser.add_argument("--ceiling", action="store_true", help="measure this program, and exit")
    parser.add_argument("--json", type=Path, help="write the ceiling to this file")
    options = parser.parse_args()
    if options.ceiling:
        found = ceiling(options.port, options.tokens)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))
    else:
        run(options.port, options)


if __name__ == "__main__":
    main()
