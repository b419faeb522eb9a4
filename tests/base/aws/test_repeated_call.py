"""Repeated calls against aiobotocore's own: the same requests, the same errors."""

import asyncio
import ssl
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import ClientError, HTTPClientError
from botocore.parsers import ResponseParserError
from multidict import CIMultiDict

from rollout_backend.base import aws
from rollout_backend.base.aws.repeated_call import Request, authorize

KEY = "runs/run/steps/0/task-a.0~1"
ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/mine-0123456789"
QUEUE = "https://sqs.us-east-1.amazonaws.com/123456789012/mine"
SESSION = "s" * 40
RUNTIME = {"agentRuntimeArn": ARN, "qualifier": "DEFAULT"}
RETRIES = {"s3": 3, "sqs": 2, "bedrock-agentcore": 0}  # as the stores, queues and runtimes open them

GET = ("s3", "get_object", {"Bucket": "my-bucket"}, {"Key": KEY})
RECEIVE = (
    "sqs",
    "receive_message",
    {"QueueUrl": QUEUE, "WaitTimeSeconds": 20, "AttributeNames": ["SentTimestamp"]},
    {},
)
DELETE = ("sqs", "delete_message_batch", {"QueueUrl": QUEUE}, {"Entries": [{"Id": "0", "ReceiptHandle": "ü+/="}]})
INVOKE = (
    "bedrock-agentcore",
    "invoke_agent_runtime",
    {**RUNTIME, "contentType": "application/json", "accept": "application/json"},
    {"runtimeSessionId": SESSION, "payload": b'{"q": 1}'},
)
STOP = ("bedrock-agentcore", "stop_runtime_session", RUNTIME, {"runtimeSessionId": SESSION, "clientToken": "t" * 33})
ACCESS_POINT = ("s3", "get_object", {"Bucket": "arn:aws:s3:us-east-1:123456789012:accesspoint/mine"}, {"Key": KEY})
CALLS = [
    ("s3", "get_object", {"Bucket": "my-bucket"}, {"Key": "a b+c&d?e%f/ü//.."}),
    ("s3", "get_object", {"Bucket": "my.dotted.bucket"}, {"Key": KEY}),
    RECEIVE,
    DELETE,
    (*INVOKE[:3], {"runtimeSessionId": SESSION, "payload": b""}),
    STOP,
]
ENVIRONMENTS = {
    "default": {},
    "FIPS": {"AWS_USE_FIPS_ENDPOINT": "true"},
    "dual stack": {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
    "endpoint": {"AWS_ENDPOINT_URL": "http://emulator.example:4566/path"},
    "session token": {"AWS_SESSION_TOKEN": "token"},
}


@pytest.fixture
def frozen_clock(monkeypatch) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: now)


class FakeResponse:
    status_code = 200


def opened(service: str, **more: Any) -> Any:
    return aws.client(service, **{"region": "us-east-1", "retries": RETRIES[service], **more})


# --- requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("call", [GET, ACCESS_POINT, INVOKE], ids=["object", "access point", "invoke"])
async def test_a_request_equals_that_of_aiobotocore(played_aws, frozen_clock, monkeypatch, environment, call):
    for name, value in ENVIRONMENTS[environment].items():
        monkeypatch.setenv(name, value)
    async with opened(call[0]) as client:
        await compare(played_aws, client, *call[1:])


@pytest.mark.parametrize(("service", "method", "fixed", "varying"), CALLS)
async def test_a_request_without_a_proxy_equals_that_of_aiobotocore(
    played_aws, frozen_clock, monkeypatch, service, method, fixed, varying
):
    """Such requests do not go through aiohttp. An access point is a host name, which the player has not."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with opened(service, endpoint_url=f"{played_aws.url}/path") as client:
        await compare(played_aws, client, method, fixed, varying)


async def test_a_call_without_a_proxy_verifies_the_certificate(played_aws, authority, monkeypatch):
    monkeypatch.setenv("no_proxy", "localhost")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    server = await asyncio.start_server(played_aws.serve, "127.0.0.1", 0, ssl=tls)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    async with opened("bedrock-agentcore", endpoint_url=url) as client:
        await client.repeated("stop_runtime_session", **RUNTIME)(**STOP[3])
    assert len(played_aws.sent) == 1
    monkeypatch.delenv("AWS_CA_BUNDLE")
    async with opened("bedrock-agentcore", endpoint_url=url) as client:
        with pytest.raises(aws.NO_CONNECTION, match="CERTIFICATE_VERIFY_FAILED"):
            await client.repeated("stop_runtime_session", **RUNTIME)(**STOP[3])
    server.close()
    assert len(played_aws.sent) == 1


async def compare(played_aws: Any, client: Any, method: str, fixed: dict[str, Any], varying: dict[str, Any]) -> None:
    """Compare a call of the client with two repeated ones."""
    await getattr(client, method)(**fixed, **varying)
    repeated = client.repeated(method, **fixed)
    await repeated(**varying)
    await repeated(**varying)
    for sent in played_aws.sent:  # ids, and the order of the user agent's parts is arbitrary
        del sent.headers["user-agent"], sent.headers["amz-sdk-invocation-id"]
    expected, *repeats = played_aws.sent
    assert "authorization" in expected.headers
    assert repeats == [expected, expected]


async def test_a_line_break_in_a_header_is_not_sent(played_aws, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with opened("bedrock-agentcore", endpoint_url=played_aws.url) as client:
        stop = client.repeated("stop_runtime_session", **RUNTIME)
        with pytest.raises(HTTPClientError, match="header"):
            await stop(runtimeSessionId=f"{SESSION}\r\nX: y", clientToken="t" * 33)
    assert played_aws.sent == []


async def test_calls_of_one_client_are_kept_apart(played_aws):
    async with opened("s3") as client:
        one, other = (client.repeated("get_object", Bucket=bucket) for bucket in ("one", "other"))
        await one(Key="a")
        await client.get_object(Bucket="third", Key="a", Range="bytes=0-0")
        await other(Key="a")
        await one(Key="a")
    assert [sent.url.partition(".")[0] for sent in played_aws.sent] == [
        f"https://{bucket}" for bucket in ("one", "third", "other", "one")
    ]
    assert ["range" in sent.headers for sent in played_aws.sent] == [False, True, False, False]


async def test_renewed_credentials_are_used(played_aws, provider):
    """Credentials are renewed within minutes of their end, which these never leave."""
    provider.returns(lasting_s=60)
    async with opened("s3") as client:
        get = client.repeated("get_object", Bucket="my-bucket")
        for _ in range(3):
            await get(Key=KEY)
    assert len({sent.headers["authorization"].partition("/")[0] for sent in played_aws.sent}) == 3


@pytest.mark.parametrize(("version", "botocores"), [("v4", SigV4Auth), ("s3v4", S3SigV4Auth)])
@pytest.mark.parametrize("token", [None, "token"])
@pytest.mark.parametrize("day", [1, 2])
def test_a_signature_equals_that_of_botocore(monkeypatch, version, botocores, token, day):
    """The services of the other tests check no signature."""
    now = datetime(2026, 1, day, 3, 4, 5, tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: now)
    credentials = ReadOnlyCredentials("AK", f"secret {day}", token)
    headers = {"Host": "h.example", "X-Amz-B": " a   b\tc ", "x-amz-a": "é", "User-Agent": "not signed", "B": ""}
    url, body = "https://h.example/a%20b/../c?z=1&a=%2F&a=", b"body"

    expected = AWSRequest("POST", url, headers, body)
    botocores(credentials, "service", "region").add_auth(expected)
    request = Request("POST", url, CIMultiDict(headers), body, {})
    authorize(request, credentials, version, "service", "region")
    assert request.headers["Authorization"] == expected.headers["Authorization"]


# --- errors -----------------------------------------------------------------------------------------------

XML = "<Error><Code>{}</Code><Message>Because.</Message><RequestId>R</RequestId></Error>"
JSON = '{{"__type": "com.amazonaws#{}", "message": "Because."}}'
NO_QUEUE = {"x-amzn-query-error": "AWS.SimpleQueueService.NonExistentQueue;Sender"}
REFUSALS = [
    (GET, 404, {}, XML.format("NoSuchKey")),
    (GET, 400, {}, "no XML"),
    (RECEIVE, 400, NO_QUEUE, JSON.format("QueueDoesNotExist")),
    (DELETE, 400, {}, JSON.format("ExpiredTokenException")),
    (INVOKE, 424, {"x-amzn-errortype": "RuntimeClientError:http://internal/"}, '{"message": "Because."}'),
    (INVOKE, 402, {}, JSON.format("ServiceQuotaExceededException")),
    (INVOKE, 500, {}, "<html>no JSON</html>"),
    (INVOKE, 503, {}, ""),
    (INVOKE, 409, {}, '{"code": "RetryableConflictException", "Message": "Because."}'),
    (STOP, 404, {}, JSON.format("ResourceNotFoundException")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "status", "headers", "body"), REFUSALS)
async def test_a_refusal_is_that_of_aiobotocore(played_aws, call, status, headers, body):
    service, method, fixed, varying = call
    played_aws.answer = lambda sent: (status, headers, body.encode())
    async with opened(service) as client:
        with pytest.raises(ClientError) as expected:
            await getattr(client, method)(**fixed, **varying)
        with pytest.raises(ClientError) as caught:
            await client.repeated(method, **fixed)(**varying)
    assert type(caught.value).__name__ == type(expected.value).__name__
    assert caught.value.response["Error"] == expected.value.response["Error"]
    assert aws.status_of(caught.value) == aws.status_of(expected.value) == status


async def test_timestamps_of_listings_and_headers_are_parsed(played_aws):
    at, item = "2026-01-02T03:04:05", "<Contents><LastModified>{}.000Z</LastModified></Contents>"
    body = f"<ListBucketResult>{item.format(at)}</ListBucketResult>".encode()
    played_aws.answer = lambda sent: (200, {"Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}, body)
    async with opened("s3") as client:
        [listed] = (await client.list_objects_v2(Bucket="my-bucket"))["Contents"]
        got = await client.get_object(Bucket="my-bucket", Key=KEY)
    assert listed["LastModified"] == got["LastModified"] == datetime.fromisoformat(f"{at}Z")


async def test_a_call_after_its_client_is_closed_opens_no_connection(played_aws):
    async with opened("s3", retries=0) as client:
        repeated = client.repeated("get_object", Bucket="my-bucket")
    for call in (repeated(Key=KEY), client.get_object(Bucket="my-bucket", Key=KEY)):
        with pytest.raises(HTTPClientError, match="the client is closed"):
            await call
    assert played_aws.sent == []


async def test_a_hook_of_botocore_may_answer_a_call(played_aws):
    """As botocore's Stubber does: then there is no request to prepare."""
    answer = {"Messages": [], "ResponseMetadata": {"HTTPStatusCode": 200}}
    service, method, fixed, _ = RECEIVE
    async with opened(service) as client:
        client.meta.events.register("before-call.sqs.ReceiveMessage", lambda **_: (FakeResponse(), answer))
        repeated = client.repeated(method, **fixed)
        assert [await repeated(), await repeated()] == [answer, answer]
    assert played_aws.sent == []


async def test_what_a_retry_cannot_change_is_asked_once(played_aws):
    async with opened("s3") as client:
        for status in (403, 404):
            played_aws.answer = lambda sent, status=status: (status, {}, XML.format("Why").encode())
            with pytest.raises(ClientError):
                await client.repeated("get_object", Bucket="my-bucket")(Key=KEY)
    assert len(played_aws.sent) == 2


@pytest.mark.parametrize("failure", [(500, {}, b""), (503, {}, JSON.format("X").encode()), (400, {}, b"{}")])
async def test_aiobotocore_makes_a_failed_call_again(played_aws, monkeypatch, failure):
    monkeypatch.setattr("random.random", lambda: 0.0)  # the pause
    answers = iter([failure])
    played_aws.answer = lambda sent: next(answers, (200, {}, b'{"Messages": []}'))
    async with opened("sqs") as client:
        assert (await client.repeated("receive_message", QueueUrl=QUEUE)())["Messages"] == []
    assert len(played_aws.sent) == 2


async def test_a_bucket_in_another_region_is_found_once(played_aws):
    def answer(sent):
        if "eu-west-1" in sent.url:
            return 200, {}, b"x"
        return 301, {"x-amz-bucket-region": "eu-west-1"}, XML.format("PermanentRedirect").encode()

    played_aws.answer = answer
    async with opened("s3") as client:
        get = client.repeated("get_object", Bucket="my-bucket")
        for _ in range(3):
            reply = await get(Key=KEY)
            async with reply["Body"] as body:
                assert await body.read() == b"x"
    assert [sent.url for sent in played_aws.sent][-2:] == [f"https://my-bucket.s3.eu-west-1.amazonaws.com/{KEY}"] * 2
    assert "/eu-west-1/s3/" in played_aws.sent[-1].headers["authorization"]
    assert sum("eu-west-1" not in sent.url for sent in played_aws.sent) == 2, "the next calls know the region"


@pytest.mark.parametrize("body", [b"[1]", b'{"Messages": ['])
async def test_an_answer_that_is_no_json_object_is_no_answer(played_aws, body):
    played_aws.answer = lambda sent: (200, {}, body)
    async with opened("sqs") as client:
        with pytest.raises(ResponseParserError, match="the answer to ReceiveMessage is not a JSON object"):
            await client.repeated("receive_message", QueueUrl=QUEUE)()


async def test_a_refusal_by_a_proxy_shows_as_its_status(played_aws):
    played_aws.answer = lambda sent: (503, {}, b'"Unavailable"')
    for service, method, fixed, varying in (STOP, RECEIVE):  # aiobotocore repeats the second
        async with opened(service) as client:
            with pytest.raises(ClientError) as caught:
                await client.repeated(method, **fixed)(**varying)
        assert aws.code_of(caught.value) == "503"


@pytest.mark.parametrize("body", [b'"Forbidden"', b"<html>404</html>"])
async def test_a_proxys_404_does_not_mean_that_a_session_has_ended(played_aws, body):
    played_aws.answer = lambda sent: (404, {}, body)
    service, method, fixed, varying = STOP
    async with opened(service) as client:
        with pytest.raises(ResponseParserError, match="StopRuntimeSession is answered 404, but not by AWS"):
            await client.repeated(method, **fixed)(**varying)
