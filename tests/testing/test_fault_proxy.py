"""The fault proxy forwards calls unchanged, and injects each fault."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from botocore.exceptions import ConnectionError, HTTPClientError, ReadTimeoutError

from builders import served
from rollout_backend.base import aws
from rollout_backend.testing.fault_proxy import Fault, FaultProxy, ProxiedCall, Rule

CUT = (ConnectionError, HTTPClientError)
ODD_KEY = "a folder/ü+%41 ~'()&=?#"


@pytest.fixture
async def through(local_aws) -> AsyncIterator[Callable[..., Awaitable[tuple[FaultProxy, Any, Any]]]]:
    """A proxy with these rules in front of the local storage, with S3 and SQS clients that use it."""
    async with AsyncExitStack() as stack:

        async def open_(*rules: Rule, seed: int = 0, read_timeout_s: float = 120.0) -> tuple[FaultProxy, Any, Any]:
            proxy = await stack.enter_async_context(FaultProxy(local_aws.endpoint_url, rules, seed))
            where = {"region": local_aws.region, "endpoint_url": proxy.url, "read_timeout_s": read_timeout_s}
            s3, sqs = [await stack.enter_async_context(aws.client(service, **where)) for service in ("s3", "sqs")]
            return proxy, s3, sqs

        yield open_


@pytest.fixture
async def queue(local_aws, run_id) -> AsyncIterator[str]:
    where = {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url}
    async with aws.client("sqs", **where) as sqs:
        url = (await sqs.create_queue(QueueName=run_id))["QueueUrl"]
        yield url
        await sqs.delete_queue(QueueUrl=url)


async def bodies(sqs: Any, queue: str) -> list[str]:
    found: list[str] = []
    while messages := (await sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)).get("Messages"):
        found += [message["Body"] for message in messages]
    return sorted(found)


async def test_calls_without_a_rule_pass_unchanged() -> None:
    seen: list[tuple[str, str, list[tuple[str, str]], bytes]] = []

    async def note(request: web.Request) -> web.Response:
        seen.append((request.method, request.raw_path, list(request.headers.items()), await request.read()))
        return web.Response(status=207, body=b"\0\xff", headers={"x-amz-id": "7", "Content-Type": "odd/kind"})

    async with served(note) as url, FaultProxy(url) as proxy, httpx.AsyncClient(timeout=60) as client:
        headers = {"Host": "bucket.example", "Authorization": "AWS4 Credential=AK/20260101/r/s3/aws4_request, x"}
        path = "/b/a%20%C3%BC%2B%2541?x-id=a%2Fb&empty="
        answer = await client.put(f"{proxy.url}{path}", content=b"\0\1\2", headers=headers)
        call = ProxiedCall("s3:PutObject", "/b/a ü+%41", "AK", None, 207)
        assert proxy.calls == [call]
    [(method, raw_path, came, body)] = seen
    assert (method, raw_path, body) == ("PUT", path, b"\0\1\2")
    assert headers.items() <= dict(came).items()
    assert (answer.status_code, answer.content) == (207, b"\0\xff")
    assert (answer.headers["x-amz-id"], answer.headers["content-type"]) == ("7", "odd/kind")


async def test_clients_work_through_the_proxy_and_calls_are_named(through, local_aws, queue, run_id) -> None:
    proxy, s3, sqs = await through()
    key = f"{run_id}/{ODD_KEY}"
    await s3.put_object(Bucket=local_aws.bucket, Key=key, Body=b"hello")
    listed = await s3.list_objects_v2(Bucket=local_aws.bucket, Prefix=f"{run_id}/")
    assert [item["Key"] for item in listed["Contents"]] == [key]
    assert (await s3.head_object(Bucket=local_aws.bucket, Key=key))["ContentLength"] == 5
    assert await (await s3.get_object(Bucket=local_aws.bucket, Key=key))["Body"].read() == b"hello"
    await s3.delete_object(Bucket=local_aws.bucket, Key=key)
    await sqs.send_message(QueueUrl=queue, MessageBody="x")
    names = ["s3:PutObject", "s3:ListObjects", "s3:HeadObject", "s3:GetObject", "s3:DeleteObject", "sqs:SendMessage"]
    assert [call.operation for call in proxy.calls] == names
    assert {call.access_key for call in proxy.calls} == {"local"}


@pytest.mark.parametrize(("fault", "stored"), [(Fault.CUT_BEFORE, False), (Fault.CUT_AFTER, True)])
async def test_connection_is_cut_before_or_after_the_call(through, local_aws, run_id, fault, stored) -> None:
    _, s3, _ = await through(Rule("s3:PutObject", fault))
    with pytest.raises(CUT):
        await s3.put_object(Bucket=local_aws.bucket, Key=f"{run_id}/cut", Body=b"x")
    listed = await s3.list_objects_v2(Bucket=local_aws.bucket, Prefix=f"{run_id}/")
    assert bool(listed.get("Contents")) == stored


async def test_call_hangs_until_the_client_or_the_rule_times_out(through, local_aws, run_id) -> None:
    proxy, s3, _ = await through(Rule("s3:PutObject", Fault.HANG, times=1), read_timeout_s=0.3)
    _, patient, _ = await through(Rule("s3:GetObject", Fault.HANG, seconds=0.2))
    put = {"Bucket": local_aws.bucket, "Key": f"{run_id}/hung", "Body": b"x", "IfNoneMatch": "*"}
    with pytest.raises(ReadTimeoutError):
        await s3.put_object(**put)
    assert proxy.calls[0].status is None
    await patient.put_object(**put)  # the first call was not executed, or this one would be refused
    assert (await patient.get_object(Bucket=local_aws.bucket, Key=f"{run_id}/hung"))["ContentLength"] == 1


async def test_messages_are_dropped_doubled_or_reordered(through, queue) -> None:
    _, _, sqs = await through(Rule("sqs:SendMessage", Fault.DROP, times=1))
    sent = await sqs.send_message(QueueUrl=queue, MessageBody="dropped")
    assert sent["MD5OfMessageBody"] == hashlib.md5(b"dropped").hexdigest()
    await sqs.send_message(QueueUrl=queue, MessageBody="kept")
    _, _, twice = await through(Rule("sqs:SendMessage", Fault.DOUBLE))
    await twice.send_message(QueueUrl=queue, MessageBody="doubled")
    assert await bodies(sqs, queue) == ["doubled", "doubled", "kept"]
    proxy, _, slow = await through(Rule("sqs:SendMessage", Fault.DELAY, seconds=0.5))
    done: list[str] = []

    async def send(body: str) -> None:
        await slow.send_message(QueueUrl=queue, MessageBody=body)
        done.append(body)

    order = [str(n) for n in range(8)]
    await asyncio.gather(*map(send, order))
    assert proxy.count("sqs:SendMessage", Fault.DELAY) == 8
    assert sorted(done) == order != done


@pytest.mark.parametrize(
    ("fault", "length", "error"),
    [
        (Fault.CUT_BODY, "1000", aiohttp.ClientPayloadError),
        (Fault.RESET_BODY, "1000", aiohttp.ClientError),
        (Fault.NO_LENGTH, None, None),
        (Fault.TRUNCATE, "500", None),
        (Fault.SLOW_BODY, "1000", None),
    ],
)
async def test_bodies_are_cut_or_slowed(through, local_aws, run_id, fault, length, error) -> None:
    rule = Rule("s3:GetObject", fault, path="*/hit", seconds=0.01)
    proxy, s3, _ = await through(rule)
    for name in ("hit", "missed"):
        await s3.put_object(Bucket=local_aws.bucket, Key=f"{run_id}/{name}", Body=b"x" * 1000)
    sent = b"x" * (1000 if fault is Fault.SLOW_BODY else 500)
    urls = {}
    for name in ("hit", "missed"):
        place = {"Bucket": local_aws.bucket, "Key": f"{run_id}/{name}"}
        urls[name] = await s3.generate_presigned_url("get_object", Params=place)
    async with aiohttp.ClientSession() as http:
        async with http.get(urls["hit"]) as reply:
            assert reply.headers.get("Content-Length") == length
            if error is None:
                assert await reply.read() == sent
            else:
                with pytest.raises(error):
                    await reply.read()
        async with http.get(urls["missed"]) as reply:
            assert len(await reply.read()) == 1000
    assert proxy.count("s3:GetObject", fault) == rule.hits == 1


def test_seed_hits_the_same_calls_in_any_order() -> None:
    paths = [f"/b/{n}" for n in range(200)]

    def hit(order: list[str], seed: int) -> set[str]:
        rule = Rule("s3:Get*", Fault.FAIL, share=0.2)
        return {path for path in order if rule.hit(ProxiedCall("s3:GetObject", path, ""), b"", seed)}

    assert hit(paths, 1) == hit(paths[::-1], 1) != hit(paths, 2)
    assert 20 < len(hit(paths, 1)) < 60


def test_rule_stops_after_its_maximum_of_hits() -> None:
    call, body = ProxiedCall("sqs:SendMessage", "/", "AK"), json.dumps({"MessageBody": "x"}).encode()
    few = Rule("sqs:*", Fault.FAIL, times=2)
    assert [few.hit(call, body, 0) for _ in range(4)] == [True, True, False, False]
    each = Rule("sqs:*", Fault.FAIL, once_each=True)
    assert [each.hit(call, one, 0) for one in (body, body, b"other")] == [True, False, True]
    other = Rule("sqs:*", Fault.FAIL, access_key="old-*")
    assert not other.hit(call, body, 0)
