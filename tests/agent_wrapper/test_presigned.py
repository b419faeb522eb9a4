"""Results written by URL, to moto's S3 and to a scripted one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from botocore.config import Config

from agent_wrapper.contract import Outcome, RolloutRequest
from agent_wrapper.publish import Publisher, PublishError, WriteOutcome
from agent_wrapper.shared.presigned import PutRefused, put_once
from stub_server import HANG_UP, Request, StubServer

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


class ScriptedS3:
    """Answers each PUT with the next scripted status and body, and then with 200."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.headers: list[dict[str, str]] = []
        self.left = list(answers)
        self.url = ""

    def handle(self, request: Request) -> tuple[int, bytes]:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return self.left.pop(0) if self.left else (200, b"")


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedS3]]:
    with ExitStack() as stack:

        def start(*answers: tuple[int, bytes]) -> ScriptedS3:
            s3 = ScriptedS3(*answers)
            server = stack.enter_context(StubServer(s3.handle))
            s3.url = f"{server.url}/bucket/key?X-Amz-Signature=5ec7e7&X-Amz-Expires=9"
            return s3

        yield start


def test_the_first_write_wins(cloud):
    url = sign(cloud, "presigned/once")
    assert put_once(url, b"first", 5) is True
    assert put_once(url, b"second", 5) is False
    assert cloud.get("presigned/once") == b"first"


@pytest.mark.parametrize(
    "answers",
    [
        [(409, b"")],
        [(503, b""), (500, b""), (429, b"")],
        [(HANG_UP, b"")],
        [(400, b"<Code>ThrottlingException</Code>"), (400, b"<Code>KMS.ThrottlingException</Code>")],
        [(400, b"<Code>RequestTimeout</Code>"), (403, b"<Code>RequestTimeTooSkewed</Code>")],
    ],
    ids=["a conflict", "busy", "cut off", "throttled by KMS", "late"],
)
def test_a_temporary_refusal_is_retried(scripted, answers):
    s3 = scripted(*answers)
    assert put_once(s3.url, b"result", 120) is True
    assert len(s3.headers) == len(answers) + 1
    for sent in s3.headers:
        assert (sent["if-none-match"], sent["content-type"]) == ("*", "application/octet-stream")
        assert sent["content-md5"] == "tKiEF7PQFw11TGR8MLchag==", "a bucket with Object Lock requires it"
        assert "authorization" not in sent


def test_retries_end(scripted):
    s3 = scripted(*[(503, b"<Code>SlowDown</Code>")] * 2)
    with pytest.raises(PutRefused, match="503 SlowDown"):
        put_once(s3.url, b"result", 0)
    assert len(s3.headers) == 1


def test_a_permanent_refusal_is_not_retried_and_no_url_is_logged(scripted, caplog):
    caplog.set_level(logging.DEBUG)
    s3 = scripted((403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"))
    with pytest.raises(PutRefused) as caught:
        put_once(s3.url, b"result", 60)
    assert str(caught.value) == "S3 answered 403 AccessDenied"
    assert len(s3.headers) == 1
    assert "PUT http://127.0.0.1" in caplog.text  # httpx logs it if the agent enables this
    assert "5ec7e7" not in caplog.text


def test_an_absent_server_is_reported_without_the_url(dead_url):
    with pytest.raises(PutRefused) as caught:
        put_once(f"{dead_url}/bucket/key?X-Amz-Signature=5ec7e7", b"result", 0.5)
    assert "ConnectError" in str(caught.value)
    assert "5ec7e7" not in str(caught.value)


def test_the_publisher_uses_the_url(cloud, scripted):
    request = {"bucket": cloud.bucket, "urls": {"result": "http://s3/r", "failure_marker": "http://s3/n"}}
    target = RolloutRequest.model_fields["result"].annotation.model_validate(request)
    publisher = Publisher()
    publisher.prepare(target)
    url = sign(cloud, "presigned/publisher")
    assert publisher.publish(target, "presigned/publisher", b"result", 5, url) is WriteOutcome.NOW
    assert publisher.publish(target, "presigned/publisher", b"result", 5, url) is WriteOutcome.UNSEEN
    assert publisher._clients == {}, "no client of AWS was made"
    with pytest.raises(PublishError, match=rf"cannot write s3://{cloud.bucket}/k: PutRefused: S3 answered 403"):
        publisher.publish(target, "k", b"result", 5, scripted((403, b"")).url)


@pytest.mark.parametrize(("body", "outcome"), [("good", Outcome.COMPLETED), ("cut", Outcome.INFRA_ERROR)])
def test_a_container_without_credentials_publishes_its_result_or_its_failure_marker(
    start_container, cloud, body, outcome
):
    container = start_container("async", **NO_CREDENTIALS)
    block = container.request([(403, b"no")] if body == "cut" else None, result__queue_url=None)
    request = RolloutRequest.parse(block)
    keys = {"result": request.key_for(Outcome.COMPLETED), "failure_marker": request.key_for(Outcome.INFRA_ERROR)}
    block["result"]["urls"] = {name: sign(cloud, key) for name, key in keys.items()}
    assert container.invoke("return 1.0", block).status_code == 200
    container.await_idle()
    rollout = cloud.read(request.key_for(outcome))
    assert rollout.outcome is outcome
    listed = cloud.s3.list_objects_v2(Bucket=cloud.bucket, Prefix=request.key)
    assert [item["Key"] for item in listed["Contents"]] == [request.key_for(outcome)]
