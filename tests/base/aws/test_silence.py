"""Every call to AWS ends, however the service falls silent."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from builders import eventually
from rollout_backend.base import aws
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.errors import PreflightError, StoreError
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.run.collect.store import ResultStore

HANG_S = 60.0  # limits of the calls are fractions of a second
LARGE = bytes(8_000_000)  # more than the buffers of a connection hold


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def reads_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.Event().wait()


async def trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a byte of the response's body from time to time: each restarts aiohttp's read timeout."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await asyncio.sleep(0.02)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize("serve", [says_nothing, reads_nothing, trickles])
async def test_every_call_to_a_silent_service_ends(monkeypatch, serve):
    monkeypatch.setattr("rollout_backend.base.aws.clients._SLOWEST_BYTES_PER_S", 100_000_000)
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("NO_PROXY", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    served: list[asyncio.Task[None]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.ensure_future(serve(reader, writer)))
        await asyncio.wait([served[-1]])
        writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with AsyncExitStack() as stack:
        limits = {"region": "us-east-1", "endpoint_url": url, "connect_timeout_s": 0.1, "read_timeout_s": 0.2}
        s3 = await stack.enter_async_context(aws.client("s3", **limits, connections=1))
        sqs = await stack.enter_async_context(aws.client("sqs", **limits))
        runtime = await stack.enter_async_context(aws.client("bedrock-agentcore", **limits))
        store = ResultStore(StorageConfig(bucket="bucket"), s3, stack)
        store.get_s = 0.5

        async def list_all() -> list[str]:
            return [key async for key in store.keys("a/")]

        stop = runtime.repeated("stop_runtime_session", agentRuntimeArn="arn:aws:a:b:1:runtime/c-0123456789")
        presigner = Presigner(StorageConfig(bucket="bucket"), AwsConfig(endpoint_url=url))
        presigner._s3 = s3
        queue = f"{url}/1/q"
        calls: dict[str, Awaitable[object]] = {
            "get": store.get("a"),
            "put": store.put("a", b"{}"),
            "put a large object": store.put("a", LARGE),
            "put if it is new": store.put_if_match("a", b"{}", None),
            "list": list_all(),
            "receive": sqs.repeated("receive_message", QueueUrl=queue)(),
            "delete": sqs.repeated("delete_message_batch", QueueUrl=queue)(Entries=[]),
            "create a queue": sqs.create_queue(QueueName="q"),
            "stop": stop(runtimeSessionId="s" * 40),
            "write by a URL": presigner.check(60.0),
        }
        async with asyncio.timeout(HANG_S):
            ends = await asyncio.gather(*calls.values(), return_exceptions=True)
    expected = (StoreError, PreflightError, *aws.CALL_ERRORS)
    assert {name for name, end in zip(calls, ends, strict=True) if not isinstance(end, expected)} == set()
    server.close()
    for task in served:
        task.cancel()
    await asyncio.gather(*served, return_exceptions=True)
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_write_does_not_wait_for_permission_to_send_its_body(played_aws, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    played_aws.answer = lambda sent: (200, {}, b"")
    async with aws.client("s3", region="us-east-1", endpoint_url=played_aws.url) as s3:
        await s3.put_object(Bucket="bucket", Key="a", Body=b"{}")
    assert "expect" not in played_aws.sent[0].headers
