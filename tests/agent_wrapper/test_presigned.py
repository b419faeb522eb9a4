"""Results written by URL, against a real S3 and against one that misbehaves on cue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from botocore.config import Config

from agent_wrapper.contract import Outcome, RolloutRequest
from agent_wrapper.presigned import PutRefused, put_once
from agent_wrapper.publish import Publisher, PublishError, WriteOutcome

NO_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "",
    "AWS_SECRET_ACCESS_KEY": "",
    "AWS_ENDPOINT_URL": "",
    "AWS_DEFAULT_REGION": "",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_CONFIG_FILE": "/dev/null",
}


def sign(cloud, key: str) -> str:
    import boto3

    s3 = boto3.client(
        "s3",
        endpoint_url=cloud.url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    params = {
        "Bucket": cloud.bucket,
        "Key": key,
        "ContentType": "application/octet-stream",
        "IfNoneMatch": "*",
    }
    return str(s3.generate_presigned_url("put_object", Params=params))


class CuedS3:
    """Answers each PUT with the next cue's status and body; 0 hangs up. Then with 200."""

    def __init__(self, *cues: tuple[int, bytes]) -> None:
        self.headers: list[dict[str, str]] = []
        s3, left = self, list(cues)

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                s3.headers.append({name.lower(): value for name, value in self.headers.items()})
                status, body = left.pop(0) if left else (200, b"")
                if not status:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/bucket/key?X-Amz-Signature=5ec7e7&X-Amz-Expires=9"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def cued() -> Iterator[type[CuedS3]]:
    made: list[CuedS3] = []

    def make(*cues: tuple[int, bytes]) -> CuedS3:
        made.append(CuedS3(*cues))
        return made[-1]

    yield make
    for s3 in made:
        s3.stop()


def test_the_first_write_stands(cloud):
    url = sign(cloud, "presigned/once")
    assert put_once(url, b"first", 5) is True
    assert put_once(url, b"second", 5) is False
    assert cloud.s3.get_object(Bucket=cloud.bucket, Key="presigned/once")["Body"].read() == b"first"


@pytest.mark.parametrize("cues", [[409], [503, 500, 429], [0]])
def test_a_passing_refusal_is_tried_again(cued, cues):
    s3 = cued(*((status, b"") for status in cues))
    assert put_once(s3.url, b"result", 30) is True
    assert len(s3.headers) == len(cues) + 1
    for sent in s3.headers:
        assert (sent["if-none-match"], sent["content-type"]) == ("*", "application/octet-stream")
        assert "authorization" not in sent


def test_trying_again_has_an_end(cued):
    s3 = cued(*[(503, b"<Code>SlowDown</Code>")] * 99)
    with pytest.raises(PutRefused, match="503 SlowDown"):
        put_once(s3.url, b"result", 1)
    assert 1 < len(s3.headers) < 10


def test_a_refusal_for_good_is_tried_once_and_tells_no_url(cued, caplog):
    caplog.set_level(logging.DEBUG)
    s3 = cued((403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"))
    with pytest.raises(PutRefused) as caught:
        put_once(s3.url, b"result", 60)
    assert str(caught.value) == "S3 answered 403 AccessDenied"
    assert len(s3.headers) == 1
    assert "PUT http://127.0.0.1" in caplog.text  # httpx tells it where the agent wants it to
    assert "5ec7e7" not in caplog.text


def test_nobody_there_is_told_without_the_url(dead_url):
    with pytest.raises(PutRefused) as caught:
        put_once(f"{dead_url}/bucket/key?X-Amz-Signature=5ec7e7", b"result", 0.5)
    assert "ConnectError" in str(caught.value)
    assert "5ec7e7" not in str(caught.value)


def test_the_publisher_goes_by_the_url(cloud, cued):
    request = {"bucket": cloud.bucket, "urls": {"result": "http://s3/r", "failure_marker": "http://s3/n"}}
    target = RolloutRequest.model_fields["result"].annotation.model_validate(request)
    publisher = Publisher()
    publisher.prepare(target)
    url = sign(cloud, "presigned/publisher")
    assert publisher.publish(target, "presigned/publisher", b"result", 5, url) is WriteOutcome.NOW
    assert publisher.publish(target, "presigned/publisher", b"result", 5, url) is WriteOutcome.UNSEEN
    assert publisher._clients == {}, "no client of AWS was made"
    with pytest.raises(PublishError, match=rf"cannot write s3://{cloud.bucket}/k: PutRefused: S3 answered 403"):
        publisher.publish(target, "k", b"result", 5, cued((403, b"")).url)


@pytest.mark.parametrize(("body", "outcome"), [("good", Outcome.COMPLETED), ("cut", Outcome.INFRA_ERROR)])
def test_a_container_without_credentials_publishes_its_result_or_its_failure_marker(
    start_container, cloud, gateway, body, outcome
):
    container = start_container("async", **NO_CREDENTIALS)
    block = container.request(result__queue_url=None)
    request = RolloutRequest.parse(block)
    keys = {"result": request.key_for(Outcome.COMPLETED), "failure_marker": request.key_for(Outcome.INFRA_ERROR)}
    block["result"]["urls"] = {name: sign(cloud, key) for name, key in keys.items()}
    if body == "cut":
        gateway.answers[f"/{request.rollout_id}/trajectory"] = [(403, b"no")]
    assert container.invoke("return 1.0", block).status_code == 200
    container.await_idle()
    rollout = cloud.read(request.key_for(outcome))
    assert rollout.outcome is outcome
    listed = cloud.s3.list_objects_v2(Bucket=cloud.bucket, Prefix=request.key)
    assert [item["Key"] for item in listed["Contents"]] == [request.key_for(outcome)]


def test_the_stand_in_for_s3_refuses_a_second_write_by_url(cloud):
    """moto checks the condition and neither signature nor expiry: those are AWS's alone to show."""
    url = sign(cloud, "presigned/unsigned")
    assert httpx.put(url, content=b"a", headers={"If-None-Match": "*"}).status_code == 200
    assert httpx.put(url, content=b"b", headers={"If-None-Match": "*"}).status_code == 412
