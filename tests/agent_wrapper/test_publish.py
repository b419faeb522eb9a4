"""Writing once and announcing, against a real S3 and SQS, and against an S3 that misbehaves on cue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agent_wrapper.contract import ResultTarget
from agent_wrapper.publish import Publisher, PublishError, WriteOutcome


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


def test_a_result_is_written_and_announced(publisher, cloud, target, key):
    assert publisher.publish(target, key, b"result", budget_s=5) is WriteOutcome.NOW
    assert cloud.s3.get_object(Bucket=cloud.bucket, Key=key)["Body"].read() == b"result"
    assert cloud.receive(target.queue_url) == [key]


def test_without_a_queue_nothing_is_announced(publisher, cloud, key):
    assert publisher.publish(ResultTarget(bucket=cloud.bucket), key, b"result", budget_s=5) is WriteOutcome.NOW
    assert cloud.s3.get_object(Bucket=cloud.bucket, Key=key)["Body"].read() == b"result"


@pytest.mark.parametrize(("body", "written"), [(b"first", WriteOutcome.BEFORE), (b"second", WriteOutcome.BY_ANOTHER)])
def test_the_first_write_stands_and_is_announced_again(publisher, cloud, target, key, body, written):
    publisher.publish(target, key, b"first", budget_s=5)
    assert cloud.receive(target.queue_url) == [key]
    assert publisher.publish(target, key, body, budget_s=5) is written
    assert cloud.receive(target.queue_url) == [key]
    assert cloud.s3.get_object(Bucket=cloud.bucket, Key=key)["Body"].read() == b"first"


def test_one_of_many_writers_wins(publisher, cloud, target, key):
    bodies = [f"writer {i}".encode() for i in range(8)]
    found: list[WriteOutcome] = []
    threads = [
        threading.Thread(target=lambda body=body: found.append(publisher.publish(target, key, body, budget_s=10)))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [WriteOutcome.BY_ANOTHER] * 7 + [WriteOutcome.NOW]


def test_a_missing_bucket_is_told_at_once(publisher, target, key):
    gone = target.model_copy(update={"bucket": "no-such-bucket"})
    with pytest.raises(PublishError, match=r"cannot write s3://no-such-bucket/publish/.*NoSuchBucket"):
        publisher.publish(gone, key, b"result", budget_s=60)


def test_a_failed_announcement_does_not_lose_the_result(publisher, cloud, target, key, caplog):
    gone = target.model_copy(update={"queue_url": f"{target.queue_url}-gone"})
    assert publisher.publish(gone, key, b"result", budget_s=1) is WriteOutcome.NOW
    assert cloud.s3.get_object(Bucket=cloud.bucket, Key=key)["Body"].read() == b"result"
    assert "was written but could not be announced" in caplog.text


# --- an S3 that misbehaves on cue -------------------------------------------------------------------------


class FaultyS3:
    """Answers each PUT as the next cue says; keeps what it stored, and refuses to store twice."""

    def __init__(self) -> None:
        self.cues: list[str] = []
        self.stored: bytes | None = None
        self.puts = 0
        s3 = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                assert self.headers["If-None-Match"] == "*"
                self.send_response_only(100)  # botocore sends the body once it is asked to
                self.end_headers()
                body = self.rfile.read(int(self.headers["Content-Length"]))
                s3.puts += 1
                cue = s3.cues.pop(0) if s3.cues else "store"
                if cue.isdigit():
                    self.answer(int(cue))
                elif s3.stored is not None:
                    self.answer(412)
                else:
                    s3.stored = body
                    if cue == "store and hang up":
                        self.close_connection = True
                    else:
                        self.answer(200)

            def do_GET(self) -> None:
                if s3.stored is None or "403 on GET" in s3.cues:
                    self.answer(403)
                else:
                    self.answer(200, s3.stored)

            def answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def faulty(publisher, monkeypatch) -> Iterator[FaultyS3]:
    s3 = FaultyS3()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
    yield s3
    for client in publisher._clients.values():
        client.close()  # so that the server's threads end
    s3.stop()


@pytest.mark.parametrize("cues", [["409"], ["503", "500", "409"], ["429"]])
def test_a_passing_refusal_is_tried_again(faulty, publisher, cloud, target, key, cues):
    faulty.cues = list(cues)
    assert publisher.publish(target, key, b"result", budget_s=30) is WriteOutcome.NOW
    assert faulty.puts == len(cues) + 1
    assert cloud.receive(target.queue_url) == [key]


def test_a_lost_answer_is_recognised(faulty, publisher, cloud, target, key):
    faulty.cues = ["store and hang up"]
    assert publisher.publish(target, key, b"result", budget_s=30) is WriteOutcome.BEFORE
    assert cloud.receive(target.queue_url) == [key]


def test_a_role_that_may_not_read_still_announces(faulty, publisher, cloud, target, key):
    faulty.stored = b"somebody's"
    faulty.cues = ["store", "403 on GET"]
    assert publisher.publish(target, key, b"result", budget_s=5) is WriteOutcome.UNSEEN
    assert cloud.receive(target.queue_url) == [key]


def test_a_refusal_for_good_is_tried_once(faulty, publisher, target, key):
    faulty.cues = ["403"]
    with pytest.raises(PublishError, match="403"):
        publisher.publish(target, key, b"result", budget_s=60)
    assert faulty.puts == 1


def test_trying_again_has_an_end(faulty, publisher, cloud, target, key):
    faulty.cues = ["503"] * 100
    with pytest.raises(PublishError, match="503"):
        publisher.publish(target, key, b"result", budget_s=1)
    assert 1 < faulty.puts < 10
    assert cloud.receive(target.queue_url, wait_s=0) == [], "nothing stands, so nothing is announced"
