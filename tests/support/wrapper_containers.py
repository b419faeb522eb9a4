"""Containers, which are processes that run the wrapper, with a stub of the gateway, S3 and SQS (moto)."""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import httpx

from agent_wrapper.app import SESSION_HEADER
from agent_wrapper.contract import Announcement, Rollout, RolloutRequest, Trajectory
from agent_wrapper.contract.messages import RESULT_LIMIT_HEADER
from builders import until
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.cloud import LocalStorage
from rollouts import make_segment
from stub_server import HANG_UP, Request

AGENT = Path(__file__).parents[1] / "agent_wrapper" / "agent_under_test.py"
CUT = -1  # as a status: the connection ends before the body does
_numbers = itertools.count(1)


def make_trajectory(sampled: int = 2) -> Trajectory:
    segment = make_segment(sampled=sampled, version=None)
    if not sampled:
        segment = segment.model_copy(update={"turns": ()})
    return Trajectory(model="the-model", segments=(segment,))


class Cloud:
    """S3 with one bucket, and SQS."""

    def __init__(self, storage: LocalStorage) -> None:
        self.bucket = storage.bucket
        self.url = storage.endpoint_url
        self.env = {**storage.environ, "AWS_ENDPOINT_URL": self.url, "AWS_EC2_METADATA_DISABLED": "true"}
        self.s3, self.sqs = self.client("s3"), self.client("sqs")

    def client(self, service: str, **more: Any) -> Any:
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        return boto3.client(service, endpoint_url=self.url, **keys, **more)

    def make_queue(self) -> str:
        return str(self.sqs.create_queue(QueueName=f"wrapper-{os.getpid()}-{next(_numbers)}")["QueueUrl"])

    def receive(self, queue_url: str, wait_s: int = 20) -> list[str]:
        """Return the keys of the next message, which is waited for unless `wait_s` is 0."""
        deadline = time.monotonic() + 6 * wait_s
        while True:
            answer = self.sqs.receive_message(QueueUrl=queue_url, WaitTimeSeconds=wait_s)
            if (messages := answer.get("Messages", [])) or time.monotonic() >= deadline:
                return [item.key for message in messages for item in Announcement.decode(message["Body"])]

    def get(self, key: str) -> bytes:
        return bytes(self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def read(self, key: str) -> Rollout:
        return Rollout.decode(self.get(key))


class Gateway:
    """Returns trajectories at /PATH/trajectory, or the scripted answers of a path. No result may exceed 4 MiB."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, bytes]]] = {}  # by path; the last one is repeated
        self.requests: list[tuple[str, str | None]] = []  # path and Authorization
        self.url = ""

    def handle(self, request: Request) -> tuple[int, bytes]:
        self.requests.append((request.path, request.headers.get("Authorization")))
        answers = self.answers.get(request.path, [(200, make_trajectory().encode())])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        if status == CUT:
            request.answer(200, body, length=len(body) + 100, **{"Content-Type": "text/event-stream"})
        elif status != HANG_UP:
            request.answer(status, body, **{RESULT_LIMIT_HEADER: str(4 * 2**20)})
        return HANG_UP, b""


class Container:
    """A process that runs the wrapper, around an agent whose body is part of each invoke, or another command."""

    def __init__(self, cloud: Cloud, gateway: Gateway, kind: str | list[str], env: dict[str, str]) -> None:
        self.cloud = cloud
        self.gateway = gateway
        port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(AGENT), kind] if isinstance(kind, str) else kind,
            env={**os.environ, **cloud.env, "HOST": "127.0.0.1", "PORT": str(port), **env},
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        until(self._answers, what="the container answers")

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the container ended with {self.process.returncode}"
        with suppress(httpx.TransportError):
            return bool(self.client.get("/ping"))
        return False

    def request(self, trajectory: list[tuple[int, bytes]] | None = None, **overrides: Any) -> dict[str, Any]:
        """Return a valid `_rollout` block with a new queue. `trajectory`: how the gateway answers for it."""
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
            "deadline": time.time() + 600,
            "remaining_s": 600,
            "result": {"bucket": self.cloud.bucket, "prefix": "p/", "queue_url": self.cloud.make_queue()},
        }
        for path, value in overrides.items():
            *parents, name = path.split("__")
            place: dict[str, Any] = block
            for parent in parents:
                place = place[parent]
            place[name] = value
        if trajectory is not None:
            self.gateway.answers[f"/{rollout_id}/trajectory"] = trajectory
        return block

    def invoke(self, body: str, block: dict[str, Any], **payload: Any) -> httpx.Response:
        return self.client.post("/invocations", json={"_rollout": block, "body": body, **payload})

    def stop_session(self, session_id: str) -> httpx.Response:
        return self.client.post("/stop", headers={SESSION_HEADER: session_id})

    def play(self, body: str, block: dict[str, Any] | None = None, **payload: Any) -> Rollout:
        """Run an agent with this body, and return its announced result."""
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
        until(lambda: self.ping()["status"] == "Healthy", what="the container is idle")
        return self.ping()

    def ping(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.client.get("/ping").text)
        return answer

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal, and wait until the process has ended, which no agent's sleep of 600 s may delay."""
        self.process.send_signal(number)
        self.process.wait(120)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


class Signal:
    """A named pipe. An agent writes to it when it has started."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self) -> None:
        readable, _, _ = select.select([self._end], [], [], 120)
        os.close(self._end)
        assert readable, "the agent never got there"
