"""Errors of AWS calls: credentials that are missing, cannot be renewed or have expired, and HTML pages of a proxy."""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from rollout_backend.agents.runtimes.agentcore.control import ReadyRuntime, control_client, pin_endpoint
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.base import aws
from rollout_backend.base.aws import Permission
from rollout_backend.config import AgentCoreConfig, AwsConfig, QueueConfig, StorageConfig
from rollout_backend.errors import (
    CredentialsExpired,
    InvokeRejected,
    NoCredentials,
    PreflightError,
    RuntimeCallError,
    StoreError,
)
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.run.collect.queue import AnnouncementQueue, check_queue
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.testing.fault_proxy import Fault, FaultProxy, Rule
from stub_server import Request, StubServer

ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/local-0123456789"
SESSION = "s" * 40
NOT_RENEWED = {
    "there is none": None,
    "it fails": lambda provider: provider.answer.unlink(),
    "it writes no JSON": lambda provider: provider.answer.write_text("log in again"),
    "its keys have expired": lambda provider: provider.returns(lasting_s=-30),
    "it is not found": lambda provider: provider.program.unlink(),
}
PAGE = b"<!doctype html>\n<html lang=en><title>403 Forbidden</title><h1>Forbidden</h1></html>"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def a_runtime(proxy: FaultProxy, stack: AsyncExitStack) -> AgentCoreRuntime:
    runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=ARN, endpoint_url=proxy.url))
    stack.push_async_callback(runtime.aclose)
    return runtime


async def test_expired_credentials_at_s3_or_sqs_end_the_run(proxy, stack, local_aws, run_id) -> None:
    where = AwsConfig(endpoint_url=proxy.url)
    store = await ResultStore.open(StorageConfig(bucket=local_aws.bucket), where)
    stack.push_async_callback(store.aclose)
    queue = await AnnouncementQueue.open(QueueConfig(wait_s=0), where, run_id)
    stack.push_async_callback(queue.aclose)
    proxy.rules.append(Rule("*", Fault.FAIL, status=400, code="ExpiredToken"))
    for call in (
        store.get("a"),
        store.put("a", b""),
        store.put_if_match("a", b"", None),
        anext(store.keys("a")),
        queue.receive(),
    ):
        with pytest.raises(CredentialsExpired, match=r"says ExpiredToken.*aws sso login.*under its run_id"):
            await call
    with pytest.raises(PreflightError, match=r"refuses us: ExpiredToken.*have expired: get new ones"):
        await store.check()
    proxy.rules.clear()


PROCESS = """#!/bin/sh
echo '{{"Version": 1, "AccessKeyId": "{}", "SecretAccessKey": "s", "SessionToken": "t"}}'
"""
FILE = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\naws_session_token = t\n"


@pytest.mark.parametrize("source", ["file", "process"])
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
async def test_refused_credentials_are_looked_for_again(
    played_aws, stack, tmp_path, monkeypatch, source, code
) -> None:
    """Neither a file nor a command says when its credentials expire."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / source
    path.touch(0o700)
    variable = {"file": "AWS_SHARED_CREDENTIALS_FILE", "process": "AWS_CONFIG_FILE"}[source]
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {path}\n")
    monkeypatch.setenv(variable, str(path if source == "file" else config))
    keys = FILE if source == "file" else PROCESS
    path.write_text(keys.format("OLD"))
    refusal = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()

    def answer(sent):
        return (400, {}, refusal) if "Credential=OLD/" in sent.headers["authorization"] else (200, {}, b"it")

    played_aws.answer = answer
    store = await ResultStore.open(StorageConfig(bucket="bucket"), AwsConfig())
    stack.push_async_callback(store.aclose)
    store._s3.credentials._pause_s = 0.0
    for _ in range(2):
        with pytest.raises(StoreError, match=code):
            await store.get("a")
    runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=ARN))
    stack.push_async_callback(runtime.aclose)
    played_aws.answer = lambda sent: (403, {"x-amzn-ErrorType": "ExpiredTokenException"}, b"{}")
    with pytest.raises(NoCredentials, match="ExpiredTokenException") as caught:
        await runtime.invoke(SESSION, b"{}")
    assert caught.value.never_opened
    played_aws.answer = answer
    path.write_text(keys.format("NEW"))
    assert await store.get("a") == b"it"


@pytest.mark.parametrize(
    ("name", "value", "region", "said"),
    [
        ("AWS_PROFILE", "nope", "us-east-1", "The config profile (nope) could not be found. Check AWS_PROFILE"),
        ("AWS_CONFIG_FILE", "damaged", "us-east-1", "Unable to parse config file"),
        ("AWS_PAGER", "", "us east", "Provided region_name 'us east' doesn't match a supported format. "),
    ],
)
async def test_aws_settings_that_make_no_client_are_named(tmp_path, monkeypatch, name, value, region, said) -> None:
    (tmp_path / "damaged").write_text("[default\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    with pytest.raises(PreflightError) as caught:
        await ResultStore.open(StorageConfig(bucket="a-bucket"), AwsConfig(region=region))
    assert said in str(caught.value)


async def test_the_runtimes_refusal_of_expired_credentials_has_its_own_reason(proxy, stack) -> None:
    proxy.rules.append(Rule("*", Fault.FAIL, status=403, code="ExpiredTokenException"))
    runtime = await a_runtime(proxy, stack)
    for call in (runtime.invoke(SESSION, b"{}"), runtime.stop(SESSION)):
        with pytest.raises(InvokeRejected, match="ExpiredTokenException") as caught:
            await call
        assert (caught.value.reason, caught.value.never_opened) == ("credentials_expired", True)
    assert [call.operation.partition(":")[2] for call in proxy.calls] == ["InvokeAgentRuntime", "StopRuntimeSession"]


def refused(status: int, code: str, message: str = "") -> ClientError:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "CreateQueue")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            refused(400, "AWS.SimpleQueueService.NonExistentQueue"),
            "q does not exist: create it, or correct queue.url",
        ),
        (refused(404, "ResourceNotFoundException"), "q does not exist"),
        (
            refused(400, "ThrottlingException", "Rate exceeded"),
            "ThrottlingException: Rate exceeded. The service is busy",
        ),
        (refused(503, "ServiceUnavailable"), "is busy: start the run again later$"),
        (refused(500, "500"), "is busy.*, or another server answers. Check aws.endpoint_url"),
        (refused(400, "InvalidSignatureException", "Signature expired: 06:00 is now earlier"), "clock is wrong"),
        (refused(403, "SignatureDoesNotMatch"), "check AWS_SECRET_ACCESS_KEY"),
        (refused(400, "UnrecognizedClientException", "token is invalid"), "AWS does not know these credentials"),
        (refused(400, "ExpiredToken"), "The AWS credentials have expired"),
        (refused(301, "PermanentRedirect"), "is in another region.*set aws.region"),
        (
            refused(400, "AuthorizationHeaderMalformed", "expecting 'eu-west-1'"),
            "expecting 'eu-west-1'.*set aws.region",
        ),
        (refused(403, "AccessDenied"), "CreateQueue is not allowed.*TrainerPolicyArn.*QueueUrl"),
        (
            refused(403, "AccessDenied", "u is not authorized to perform: kms:GenerateDataKey on resource: k"),
            "CreateQueue is not allowed.*on resource: k.*allow kms:GenerateDataKey on that key to these credentials",
        ),
        (refused(403, "Forbidden"), "Give these credentials the permission that is missing"),
        (refused(400, "InvalidAttributeValue", "too long"), "InvalidAttributeValue: too long. Check queue.url"),
    ],
)
def test_each_refusal_is_reported_by_its_cause(error: ClientError, said: str) -> None:
    message = str(aws.preflight_error(error, "q", "queue.url"))
    assert re.search(said, message)
    assert ("does not exist" in message) == ("does not exist" in said)


@pytest.mark.parametrize("end", NOT_RENEWED.values(), ids=NOT_RENEWED)
async def test_a_call_that_cannot_be_signed_is_not_sent_and_may_be_tried_again(
    proxy, stack, provider, monkeypatch, end
) -> None:
    provider.returns(lasting_s=30)
    if end is None:
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    runtime = await a_runtime(proxy, stack)
    if end is not None:
        end(provider)
    for call in (lambda: runtime.invoke(SESSION, b"{}"), lambda: runtime.stop(SESSION)):
        with pytest.raises(RuntimeCallError, match="could not be signed") as caught:
            await call()
        assert isinstance(caught.value, NoCredentials)
        assert (caught.value.reason, caught.value.never_opened) == ("no_credentials", True)
    assert proxy.calls == []


@pytest.mark.parametrize("body", [PAGE, b"null", "gesperrt für alle".encode("latin-1")])
@pytest.mark.parametrize("status", [403, 404])
async def test_a_page_shows_as_its_status_in_every_protocol(local_keys, status, body):
    def answer(_: Request) -> tuple[int, bytes]:
        return status, body

    with StubServer(answer) as server:
        place = {"region": "us-east-1", "endpoint_url": server.url}
        calls = [("sts", "get_caller_identity", {}), ("s3", "list_objects_v2", {"Bucket": "b"})]
        calls.append(("service-quotas", "list_service_quotas", {"ServiceCode": "s"}))
        for service, method, arguments in calls:
            async with aws.client(service, **place) as client:
                with pytest.raises(aws.CALL_ERRORS) as caught:
                    await getattr(client, method)(**arguments)
            said = aws.reason(caught.value)
            assert str(status) in said
            assert "<" not in said
        with pytest.raises(aws.CALL_ERRORS) as caught:
            await aws.simulate("arn:aws:iam::000000000000:role/r", [Permission("s3:GetObject", ("*",))], **place)
        assert aws.reason(caught.value) == f"{status}: not by AWS"


async def test_a_page_with_status_200_is_no_answer(local_keys):
    with StubServer(lambda _: (200, PAGE)) as server:
        async with aws.client("sts", region="us-east-1", endpoint_url=server.url) as client:
            with pytest.raises(ResponseParserError, match="is answered 200, but not by AWS"):
                await client.get_caller_identity()


async def test_a_presigned_url_is_checked_through_the_proxy_with_the_certificates_of_other_calls(played_aws):
    storage = StorageConfig(bucket="some-bucket", presigned=True)
    async with aclosing(Presigner(storage, AwsConfig(region="eu-west-1"))) as presigner:
        assert await presigner.check(600) == ""
    assert [sent.method for sent in played_aws.sent] == ["PUT", "DELETE"]
    assert all(sent.url.startswith("https://some-bucket.s3.eu-west-1.amazonaws.com/") for sent in played_aws.sent)


@pytest.mark.parametrize("body", [PAGE, b'{"ok": true}'])
async def test_a_server_that_is_no_service_of_aws_is_named_before_a_run(local_keys, stack, body: bytes):
    """For example the console of an object store, at the port next to the store's."""
    with StubServer(lambda _: (200, body)) as server:
        where = AwsConfig(endpoint_url=server.url)
        store = await ResultStore.open(StorageConfig(bucket="bucket"), where)
        stack.push_async_callback(store.aclose)
        control = await stack.enter_async_context(control_client("us-east-1", server.url))
        for check in (
            store.check(),
            check_queue(QueueConfig(), where),
            check_queue(QueueConfig(url=f"{server.url}/1/q"), where),
            pin_endpoint(control, ReadyRuntime(ARN, 1), "e", 60.0, print) if body == PAGE else store.check(),
        ):
            with pytest.raises(PreflightError, match=r"Check aws\.endpoint_url"):
                await check
