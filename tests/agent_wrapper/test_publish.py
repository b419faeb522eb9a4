"""Results are written once and announced, with credentials or by URL, to moto's S3 and SQS and to a scripted S3."""

import asyncio
import json
import logging
from collections.abc import Iterator
from functools import partial

import pytest
from botocore.config import Config
from botocore.exceptions import CredentialRetrievalError

from agent_wrapper import publish
from agent_wrapper.contract import Outcome, ResultTarget, RolloutRequest
from agent_wrapper.publish import Publisher, PublishError
from stub_server import HANG_UP, Request, StubServer
from tests.simulation.clock import in_virtual_time

SOON, LATE = partial(asyncio.timeout, 1), partial(asyncio.timeout, 120)
BY_KEY_AND_BY_URL = pytest.mark.parametrize("by_url", [False, True], ids=["by key", "by URL"])
NO_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "",
    "AWS_SECRET_ACCESS_KEY": "",
    "AWS_ENDPOINT_URL": "",
    "AWS_DEFAULT_REGION": "",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_CONFIG_FILE": "/dev/null",
}


def sign(cloud, key: str) -> str:
    s3 = cloud.client("s3", config=Config(signature_version="s3v4", s3={"addressing_style": "path"}))
    place = {"Bucket": cloud.bucket, "Key": key}
    conditions = {"ContentType": "application/octet-stream", "IfNoneMatch": "*"}
    return str(s3.generate_presigned_url("put_object", Params={**place, **conditions}))


@pytest.fixture
def publisher(cloud, monkeypatch) -> Publisher:
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    return Publisher()


@pytest.fixture
def target(cloud) -> ResultTarget:
    return ResultTarget(bucket=cloud.bucket, queue_url=cloud.make_queue())


@pytest.fixture
def key(request) -> str:
    return f"publish/{request.node.name}"


@BY_KEY_AND_BY_URL
async def test_the_first_write_wins_and_is_announced_again(publisher, cloud, target, key, by_url, caplog):
    for body in (b"first", b"second"):
        await publisher.publish(target, key, body, LATE, sign(cloud, key) if by_url else None)
        assert cloud.receive(target.queue_url) == [key]
    assert cloud.get(key) == b"first"
    assert caplog.text.count("exists: another attempt wrote it, or this one, if the response was lost") == 1


async def test_one_of_many_writers_wins(publisher, target, key, caplog):
    await asyncio.gather(*(publisher.publish(target, key, b"%d" % i, LATE) for i in range(8)))
    assert caplog.text.count("exists: another attempt wrote it") == 7


async def test_a_failed_announcement_does_not_lose_the_result(publisher, cloud, target, key, caplog):
    gone = target.model_copy(update={"queue_url": f"{target.queue_url}-gone"})
    await publisher.publish(gone, key, b"result", SOON)
    assert cloud.get(key) == b"result"
    assert "was written but could not be announced" in caplog.text


def test_with_urls_no_client_of_aws_is_made(cloud):
    urls = {"result": "http://s3/r", "failure_marker": "http://s3/n", "artifacts": "http://s3/a"}
    publisher = Publisher()
    publisher.prepare(ResultTarget.parse({"bucket": cloud.bucket, "urls": urls}))
    assert publisher._clients == {}


@pytest.mark.parametrize(("body", "outcome"), [("good", Outcome.COMPLETED), ("cut", Outcome.INFRA_ERROR)])
def test_a_container_without_credentials_publishes_its_result_or_its_failure_marker(
    start_container, cloud, body, outcome
):
    container = start_container("async", **NO_CREDENTIALS)
    block = container.request([(403, b'{"error": {}}')] if body == "cut" else None, result__queue_url=None)
    request = RolloutRequest.parse(block)
    keys = {"result": request.key_for(Outcome.COMPLETED), "failure_marker": request.key_for(Outcome.INFRA_ERROR)}
    keys["artifacts"] = request.artifacts_key
    block["result"]["urls"] = {name: sign(cloud, key) for name, key in keys.items()}
    assert container.invoke("return 1.0", block).status_code == 200
    container.await_idle()
    rollout = cloud.read(request.key_for(outcome))
    assert rollout.outcome is outcome
    listed = cloud.s3.list_objects_v2(Bucket=cloud.bucket, Prefix=request.key)
    assert [item["Key"] for item in listed["Contents"]] == [request.key_for(outcome)]


# --- a scripted S3 ----------------------------------------------------------------------------------------


class ScriptedS3:
    """Answers each PUT with the next scripted status and error code, and then with 200."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def handle(self, request: Request) -> tuple[int, bytes]:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        status, _, code = (self.answers.pop(0) if self.answers else "200").partition(" ")
        return int(status), f"<Error><Code>{code}</Code></Error>".encode() if code else b""


@pytest.fixture
def faulty(publisher, monkeypatch) -> Iterator[ScriptedS3]:
    s3 = ScriptedS3()
    with StubServer(s3.handle) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        s3.url = f"{server.url}/bucket/key?X-Amz-Signature=5ec7e7&X-Amz-Expires=9"
        yield s3


TEMPORARY = (
    ["409"],
    ["503", "429"],
    [f"{HANG_UP}"],
    ["400 ThrottlingException", "400 KMS.ThrottlingException"],
    ["400 RequestTimeout", "403 RequestTimeTooSkewed"],  # a body that came too slowly; after a snapshot's restore
    ["403 AccessDenied", "404 NoSuchBucket"],  # while a policy, a grant of a key or a bucket is replaced
)
STALE = ["400 ExpiredToken", "403 InvalidAccessKeyId"]  # a later client may have other credentials


@pytest.mark.parametrize(
    ("by_url", "answers"), [(by_url, each) for by_url in (False, True) for each in TEMPORARY] + [(False, STALE)]
)
async def test_a_temporary_refusal_is_retried(faulty, publisher, cloud, target, key, by_url, answers):
    faulty.answers = [*answers]
    await publisher.publish(target, key, b"result", LATE, faulty.url if by_url else None)
    assert cloud.receive(target.queue_url) == [key]
    assert len(faulty.headers) == len(answers) + 1
    for sent in faulty.headers:
        assert (sent["if-none-match"], sent["content-type"]) == ("*", "application/octet-stream")
        if by_url:
            assert sent["content-md5"] == "tKiEF7PQFw11TGR8MLchag==", "a bucket with Object Lock requires it"
        assert ("authorization" in sent) is not by_url


@pytest.fixture
def at_once(monkeypatch) -> None:
    """Call services in the event loop's thread, as virtual time needs it."""

    async def call(work, name):
        return work()

    monkeypatch.setattr(publish, "in_thread", call)


@BY_KEY_AND_BY_URL
@pytest.mark.parametrize(
    ("answer", "limit_s", "ends"), [("403 AccessDenied", 3600, range(60, 90)), ("503 SlowDown", 300, [300])]
)
@in_virtual_time
async def test_retries_end(faulty, publisher, cloud, target, key, by_url, answer, limit_s, ends, at_once, caplog):
    caplog.set_level(logging.DEBUG, "httpx")
    faulty.answers = [answer] * 1000
    code = answer.partition(" ")[2]
    began = asyncio.get_running_loop().time()
    limit = partial(asyncio.timeout, limit_s)
    with pytest.raises(PublishError, match=rf"^cannot write s3://{cloud.bucket}/.*{code}") as caught:
        await publisher.publish(target, key, b"result", limit, faulty.url if by_url else None)
    assert int(asyncio.get_running_loop().time() - began) in ends
    assert cloud.receive(target.queue_url, wait_s=0) == [], "nothing is stored, so nothing is announced"
    assert not by_url or "PUT http://127.0.0.1" in caplog.text, "httpx logs it if the agent enables it"
    assert "5ec7e7" not in caplog.text + str(caught.value)


@BY_KEY_AND_BY_URL
@pytest.mark.parametrize("answers", [["503 SlowDown"] * 40, ["403 AccessDenied"] * 8, ["403 X", "503 Y"] * 20])
@in_virtual_time
async def test_s3_is_waited_for_until_the_limit(faulty, publisher, cloud, target, key, by_url, answers, at_once):
    faulty.answers = [*answers]
    await publisher.publish(target, key, b"result", partial(asyncio.timeout, 3600), faulty.url if by_url else None)
    assert cloud.receive(target.queue_url) == [key]
    assert faulty.answers == []


@BY_KEY_AND_BY_URL
@in_virtual_time
async def test_a_call_without_an_answer_is_given_up_and_repeated(publisher, target, key, by_url, monkeypatch):
    """A server may take the body, or send its answer, byte by byte: no timeout of a read ends that."""
    calls = []

    async def call(work, name):
        calls.append(name)
        if len(calls) != 3:
            await asyncio.Event().wait()
        return True

    monkeypatch.setattr(publish, "in_thread", call)
    limit = partial(asyncio.timeout, 600)
    await publisher.write(target, key, b"result", limit, "http://s3/key" if by_url else None)
    assert len(calls) == 3
    with pytest.raises(PublishError, match="no answer within 60 s"):
        await publisher.write(
            target, key, b"result", partial(asyncio.timeout, 90), "http://s3/key" if by_url else None
        )


async def test_an_absent_server_is_reported_without_the_url(publisher, target, dead_url):
    with pytest.raises(PublishError, match="ConnectError") as caught:
        await publisher.publish(target, "k", b"result", SOON, f"{dead_url}/bucket/key?X-Amz-Signature=5ec7e7")
    assert "5ec7e7" not in str(caught.value)


@BY_KEY_AND_BY_URL
async def test_a_result_whose_answer_is_lost_is_announced(faulty, publisher, cloud, target, key, by_url):
    faulty.answers = [f"{HANG_UP}", "412 PreconditionFailed"]
    await publisher.publish(target, key, b"result", LATE, faulty.url if by_url else None)
    assert cloud.receive(target.queue_url) == [key]


@pytest.mark.parametrize("late", ["at the start", "at the end"])
async def test_credentials_that_come_late_lose_no_result(
    faulty, publisher, cloud, target, key, tmp_path, monkeypatch, late
):
    """A client keeps the credentials that it was made with, also if there were none."""
    tries = tmp_path / "tries"
    keys = json.dumps({"Version": 1, "AccessKeyId": "AK", "SecretAccessKey": "s"})
    program = tmp_path / "keys"
    program.write_text(f"#!/bin/sh\necho >> {tries}\n[ $(wc -l < {tries}) -gt 2 ] || exit 1\necho '{keys}'\n")
    program.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    if late == "at the start":
        with pytest.raises(CredentialRetrievalError):
            publisher.prepare(target)
    await publisher.publish(target, key, b"result", LATE)
    assert cloud.receive(target.queue_url) == [key]
