"""Results are written once and announced, to moto's S3 and SQS and to a scripted S3."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import CredentialRetrievalError

from agent_wrapper.contract import ResultTarget
from agent_wrapper.publish import Publisher, PublishError, WriteOutcome
from stub_server import HANG_UP, Request, StubServer


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


@pytest.mark.parametrize(("body", "written"), [(b"first", WriteOutcome.BEFORE), (b"second", WriteOutcome.BY_ANOTHER)])
def test_the_first_write_wins_and_is_announced_again(publisher, cloud, target, key, body, written):
    publisher.publish(target, key, b"first", budget_s=5)
    assert cloud.receive(target.queue_url) == [key]
    assert publisher.publish(target, key, body, budget_s=5) is written
    assert cloud.receive(target.queue_url) == [key]
    assert cloud.get(key) == b"first"


def test_one_of_many_writers_wins(publisher, cloud, target, key):
    bodies = [f"writer {i}".encode() for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: publisher.publish(target, key, body, budget_s=10), bodies))
    assert sorted(found) == [WriteOutcome.BY_ANOTHER] * 7 + [WriteOutcome.NOW]


def test_a_failed_announcement_does_not_lose_the_result(publisher, cloud, target, key, caplog):
    gone = target.model_copy(update={"queue_url": f"{target.queue_url}-gone"})
    assert publisher.publish(gone, key, b"result", budget_s=1) is WriteOutcome.NOW
    assert cloud.get(key) == b"result"
    assert "was written but could not be announced" in caplog.text


# --- a scripted S3 ----------------------------------------------------------------------------------------


class ScriptedS3:
    """Answers each PUT as the next cue says. It stores one body."""

    def __init__(self) -> None:
        self.cues: list[str] = []
        self.stored: bytes | None = None
        self.puts = 0

    def handle(self, request: Request) -> tuple[int, bytes]:
        if request.command == "GET":
            readable = self.stored is not None and "403 on GET" not in self.cues
            return (200, self.stored) if readable else (403, b"")
        assert request.headers["If-None-Match"] == "*"
        self.puts += 1
        cue = self.cues.pop(0) if self.cues else "store"
        status, _, code = cue.partition(" ")
        if status.isdigit():
            return int(status), f"<Error><Code>{code}</Code></Error>".encode() if code else b""
        if self.stored is not None:
            return 412, b""
        self.stored = request.body
        return HANG_UP if cue == "store and hang up" else 200, b""


@pytest.fixture
def faulty(publisher, monkeypatch) -> Iterator[ScriptedS3]:
    s3 = ScriptedS3()
    with StubServer(s3.handle) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        yield s3


@pytest.mark.parametrize(
    "cues",
    [
        ["409"],
        ["503", "500", "409"],
        ["429"],
        ["400 ThrottlingException", "400 RequestTimeout"],  # of KMS; a body that came too slowly
        ["403 RequestTimeTooSkewed", "400 ExpiredToken", "403 InvalidAccessKeyId"],  # after a snapshot's restore
    ],
    ids=lambda cues: ", ".join(cues),
)
def test_a_temporary_refusal_is_retried(faulty, publisher, cloud, target, key, cues):
    faulty.cues = list(cues)
    assert publisher.publish(target, key, b"result", budget_s=120) is WriteOutcome.NOW
    assert faulty.puts == len(cues) + 1
    assert cloud.receive(target.queue_url) == [key]


@pytest.mark.parametrize("late", ["at the start", "at the end"])
def test_credentials_that_come_late_lose_no_result(
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
    assert publisher.publish(target, key, b"result", budget_s=120) is WriteOutcome.NOW
    assert cloud.receive(target.queue_url) == [key]


def test_a_lost_answer_is_recognised(faulty, publisher, cloud, target, key):
    faulty.cues = ["store and hang up"]
    assert publisher.publish(target, key, b"result", budget_s=30) is WriteOutcome.BEFORE
    assert cloud.receive(target.queue_url) == [key]


def test_a_role_that_may_not_read_still_announces(faulty, publisher, cloud, target, key):
    faulty.stored = b"another's"
    faulty.cues = ["store", "403 on GET"]
    assert publisher.publish(target, key, b"result", budget_s=5) is WriteOutcome.UNSEEN
    assert cloud.receive(target.queue_url) == [key]


@pytest.mark.parametrize(("status", "budget_s"), [("403", 60), ("503", 0)], ids=["permanent", "out of time"])
def test_retries_end(faulty, publisher, cloud, target, key, status, budget_s):
    faulty.cues = [status] * 2
    with pytest.raises(PublishError, match=status):
        publisher.publish(target, key, b"result", budget_s=budget_s)
    assert faulty.puts == 1
    assert cloud.receive(target.queue_url, wait_s=0) == [], "nothing is stored, so nothing is announced"
