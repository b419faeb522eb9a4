"""A real S3 and SQS (moto, a process of its own), a small gateway, and containers: the wrapper in a real process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from agent_wrapper.app import SESSION_HEADER
from agent_wrapper.contract import Announcement, Rollout, RolloutRequest, Segment, Trajectory, Turn
from rollout_backend.serving.server_process import free_port

AGENT = Path(__file__).with_name("agent_under_test.py")
AWS_ENV = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_numbers = itertools.count(1)
CUT = 0  # for a status: the connection ends before the body does


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url)
            return
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{url} never answered"
        time.sleep(0.05)


def make_trajectory(sampled: int = 2) -> Trajectory:
    given = 3
    n = given + sampled
    segment = Segment(
        token_ids=array("i", range(n)),
        response_mask=array("B", [0] * given + [1] * sampled),
        logprobs=array("f", [float("nan")] * given + [-0.5] * sampled),
        turns=(Turn(start=given, end=n, finish_reason="stop", weight_versions=()),) if sampled else (),
    )
    return Trajectory(model="the-model", segments=(segment,))


class Cloud:
    """S3 with one bucket, and SQS."""

    bucket = "results"

    def __init__(self, url: str) -> None:
        self.url = url
        self.env = {**AWS_ENV, "AWS_ENDPOINT_URL": url}
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        self.s3 = boto3.client("s3", endpoint_url=url, **keys)
        self.sqs = boto3.client("sqs", endpoint_url=url, **keys)
        self.s3.create_bucket(Bucket=self.bucket)

    def make_queue(self) -> str:
        return str(self.sqs.create_queue(QueueName=f"q{next(_numbers)}")["QueueUrl"])

    def receive(self, queue_url: str, wait_s: int = 20) -> list[str]:
        """The keys of the next message."""
        answer = self.sqs.receive_message(QueueUrl=queue_url, WaitTimeSeconds=wait_s)
        messages = answer.get("Messages", [])
        return [item.key for message in messages for item in Announcement.decode(message["Body"])]

    def read(self, key: str) -> Rollout:
        return Rollout.decode(self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read())


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await_answer(url, process)
        cloud = Cloud(url)
        yield cloud
        cloud.s3.close()
        cloud.sqs.close()
    finally:
        process.terminate()
        process.wait()


class Gateway:
    """Hands out trajectories at /PATH/trajectory, each answer to be scripted, and fails model calls at /v1."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, bytes]]] = {}  # by path; the last one is repeated
        self.requests: list[tuple[str, str | None]] = []  # path and Authorization
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                gateway.requests.append((self.path, self.headers.get("Authorization")))
                answers = gateway.answers.get(self.path, [(200, make_trajectory().encode())])
                status, body = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(status or 200)
                self.send_header("Content-Type", "text/event-stream" if status == CUT else "application/octet-stream")
                self.send_header("Content-Length", str(len(body) + (100 if status == CUT else 0)))
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


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.stop()


class Container:
    """The wrapper in a process of its own, round an agent whose body each invoke brings along."""

    def __init__(self, cloud: Cloud, gateway: Gateway, kind: str, env: dict[str, str] | None = None) -> None:
        self.cloud = cloud
        self.gateway = gateway
        port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(AGENT), kind],
            env={**os.environ, **cloud.env, "HOST": "127.0.0.1", "PORT": str(port), **(env or {})},
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        await_answer(f"http://127.0.0.1:{port}/ping", self.process)

    def request(self, **overrides: Any) -> dict[str, Any]:
        """A valid `_rollout` block, with a queue of its own."""
        rollout_id = f"rollout-{next(_numbers)}"
        block = {
            "run_id": "run",
            "step": 3,
            "task_id": "task",
            "rollout_id": rollout_id,
            "attempt": 2,
            "session_id": "session-of-the-block",
            "endpoint": {
                "base_url": f"{self.gateway.url}/v1",
                "api_key": f"key-of-{rollout_id}",
                "name": "the-model",
                "trajectory_url": f"{self.gateway.url}/{rollout_id}/trajectory",
            },
            "sampling": {"temperature": 0.7},
            "deadline": time.time() + 60,
            "result": {"bucket": self.cloud.bucket, "prefix": "p/", "queue_url": self.cloud.make_queue()},
        }
        for path, value in overrides.items():
            *parents, name = path.split("__")
            place: dict[str, Any] = block
            for parent in parents:
                place = place[parent]
            place[name] = value
        return block

    def invoke(self, body: str, block: dict[str, Any], **payload: Any) -> httpx.Response:
        return self.client.post("/invocations", json={"_rollout": block, "body": body, **payload})

    def stop_session(self, session_id: str) -> httpx.Response:
        return self.client.post("/stop", headers={SESSION_HEADER: session_id})

    def play(self, body: str, block: dict[str, Any] | None = None, **payload: Any) -> Rollout:
        """Runs an agent with this body and waits for the announcement of its result."""
        block = block or self.request()
        answer = self.invoke(body, block, **payload)
        assert answer.status_code == 200, answer.text
        return self.await_result(block)

    def await_result(self, block: dict[str, Any]) -> Rollout:
        request = RolloutRequest.parse(block)
        [key] = self.cloud.receive(block["result"]["queue_url"])
        rollout = self.cloud.read(key)
        assert key == request.key_for(rollout.outcome)
        return rollout

    def await_idle(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while (ping := self.ping())["status"] != "Healthy":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return ping

    def ping(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.client.get("/ping").text)
        return answer

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Sends the signal. Returns the seconds until the process is gone."""
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(30)
        return time.monotonic() - started

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def start_container(cloud: Cloud, gateway: Gateway) -> Iterator[Callable[..., Container]]:
    with contextlib.ExitStack() as stack:

        def start(kind: str, **env: str) -> Container:
            container = Container(cloud, gateway, kind, env)
            stack.callback(container.close)
            return container

        yield start


@pytest.fixture(scope="session")
def sync_container(start_container: Callable[..., Container]) -> Container:
    return start_container("sync")


@pytest.fixture(scope="session")
def async_container(start_container: Callable[..., Container]) -> Container:
    return start_container("async")


@pytest.fixture(params=["sync", "async"])
def container(request: pytest.FixtureRequest) -> Container:
    """Either kind, shared by the tests that leave it running."""
    container: Container = request.getfixturevalue(f"{request.param}_container")
    return container


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def dead_url() -> str:
    """Nobody listens there."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A named pipe: whoever opens one end waits for the other."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


class Signal:
    """A named pipe whose other end says one word, in a process of its own."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self) -> None:
        readable, _, _ = select.select([self._end], [], [], 30)
        os.close(self._end)
        assert readable, "the agent never got there"


@pytest.fixture
def make_signal(tmp_path: Path) -> Callable[[], Signal]:
    return lambda: Signal(tmp_path / f"signal-{next(_numbers)}")
