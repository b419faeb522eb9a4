"""Measure what `agent_wrapper` adds to an agent's container: `python benchmarks/wrapper.py`.

- import: CPU time and peak memory of a new Python process that imports the wrapper and its server, and of one that
  imports only what it is made of: asyncio, msgpack, pydantic, starlette, uvicorn and zstandard.
- start: from the start of the container's process until it answers a ping.
- invoke: from sending an invoke until the agent's first model call has arrived.
- publish: from the agent's return until the result, with its trajectory, is written to S3, and until it is announced.

A container runs its first rollout cold, as on a runtime with one container per session, and then more of them. The
agent calls the model once, and works for some time. One local server stands in for the gateway, S3 and SQS, and
answers without delay. Times are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    ResultTarget,
    ResultUrls,
    Rollout,
    RolloutRequest,
    Sampling,
    Segment,
    Trajectory,
    Turn,
)
from rollout_backend.serving.server_process import free_port

IMPORTS = {
    "import": "import agent_wrapper, starlette.applications, uvicorn",
    "import, floor": (
        "import asyncio, msgpack, pydantic, starlette.applications, uvicorn, zstandard\n"
        "type('Model', (pydantic.BaseModel,), {})"
    ),
}
IMPORT = """
import json, resource, time
{code}
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([1000 * time.process_time(), used.ru_maxrss / 1024]))
"""
AGENT = """
import http.client, time
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
def agent(context):
    host = context.base_url.split("/")[2]
    connection = http.client.HTTPConnection(host)
    connection.request("POST", "/v1/chat/completions", b"{}", {"Authorization": "Bearer " + context.api_key})
    connection.getresponse().read()
    connection.close()
    time.sleep(context.payload["seconds"])
    return {"reward": 1.0, "returned": time.monotonic()}

app.run(host="127.0.0.1")
"""


class Services(ThreadingHTTPServer):
    """The gateway, S3 and SQS on one port, which note when a rollout reaches them."""

    daemon_threads = True

    def __init__(self, trajectory: Trajectory, presigned: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.presigned = presigned  # then there is no queue
        self.trajectory = trajectory.encode()
        self.at: dict[str, float] = {}  # seconds of the machine's monotonic clock, by event
        self.published = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def note(self, event: str) -> None:
        self.at.setdefault(event, time.monotonic())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Services

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, True)  # TCP_NODELAY

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("/chat/completions"):
            self.server.note("called")
            self._answer(b"{}")
        elif self.path == "/trajectory":
            self._answer(self.server.trajectory)
        else:  # SQS
            self.server.note("announced")
            message = json.loads(body)["MessageBody"]
            digest = hashlib.md5(message.encode()).hexdigest()
            self._answer(json.dumps({"MessageId": "1", "MD5OfMessageBody": digest}).encode())
            self.server.published.set()

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.note("stored")
        self.server.at["returned"] = float(Rollout.decode(body).extras["returned"])  # type: ignore[arg-type]
        self._answer(b"")
        if self.server.presigned:
            self.server.published.set()

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Container:
    """The wrapper with an agent, in a process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        env = {
            **os.environ,
            "PORT": str(port),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": services.url,
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }
        began = time.monotonic()
        self._process = subprocess.Popen([sys.executable, "-c", AGENT], env=env, stderr=subprocess.DEVNULL)
        while not self._answers():
            time.sleep(0.001)
        self.start_s = time.monotonic() - began

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._url}/ping", timeout=5).close()
        except urllib.error.URLError:
            return False
        return True

    @property
    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def roll_out(self, presigned: bool, agent_s: float) -> dict[str, float]:
        """Run one rollout. Return its figures in seconds."""
        self._services.at.clear()
        self._services.published.clear()
        fields = request(self._services.url, presigned).model_dump(mode="json")
        body = json.dumps({"seconds": agent_s, REQUEST_FIELD: fields}).encode()
        sent = time.monotonic()
        urllib.request.urlopen(f"{self._url}/invocations", body, timeout=30).close()
        assert self._services.published.wait(30), "the result was not published"
        at = self._services.at
        figures = {
            "invoke to first model call": at["called"] - sent,
            "return to stored": at["stored"] - at["returned"],
        }
        return figures if presigned else {**figures, "return to announced": at["announced"] - at["returned"]}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def request(url: str, presigned: bool) -> RolloutRequest:
    number = os.urandom(4).hex()
    if presigned:
        urls = ResultUrls(result=f"{url}/results/a", failure_marker=f"{url}/results/b")
        target = ResultTarget(bucket="results", urls=urls)
    else:
        target = ResultTarget(bucket="results", queue_url=f"{url}/0/queue", region="us-east-1")
    return RolloutRequest(
        run_id="benchmark",
        step=0,
        task_id=number,
        rollout_id=f"{number}.0",
        attempt=1,
        session_id=number,
        endpoint=ModelEndpoint(base_url=f"{url}/v1", api_key="key", name="m", trajectory_url=f"{url}/trajectory"),
        sampling=Sampling(),
        deadline=time.time() + 600,
        remaining_s=600,
        result=target,
    )


def trajectory_of(tokens: int) -> Trajectory:
    half = tokens // 2
    segment = Segment(
        token_ids=array("i", range(tokens)),
        response_mask=array("B", bytes(half) + b"\x01" * (tokens - half)),
        logprobs=array("f", [-0.5] * tokens),
        turns=(Turn(start=half, end=tokens, finish_reason="stop", weight_versions=()),),
    )
    return Trajectory(model="m", segments=(segment,))


def import_cost(code: str) -> tuple[float, float]:
    """Return the CPU milliseconds of a new process that runs `code`, and its peak of memory in MiB."""
    done = subprocess.run([sys.executable, "-c", IMPORT.format(code=code)], capture_output=True, check=True)
    cpu_ms, peak_mib = json.loads(done.stdout)
    return cpu_ms, peak_mib


def measure(containers: int, rollouts: int, tokens: int, agent_s: float) -> dict[str, dict[str, float]]:
    """Return figures by name and unit."""
    found: dict[str, dict[str, float]] = {}
    for name, code in IMPORTS.items():
        costs = [import_cost(code) for _ in range(max(2, containers))]
        found[name] = {"ms of CPU": min(cost[0] for cost in costs), "MiB": statistics.median(c[1] for c in costs)}
    for presigned in (False, True):
        services = Services(trajectory_of(tokens), presigned)
        how = "presigned URL" if presigned else "credentials"
        cold: list[dict[str, float]] = []
        warm: list[dict[str, float]] = []
        memory: list[float] = []
        for _ in range(containers):
            container = Container(services)
            idle_mib = container.memory_mib
            cold.append({"start to ping": container.start_s, **container.roll_out(presigned, agent_s)})
            warm += [container.roll_out(presigned, 0) for _ in range(rollouts)]
            memory += [container.memory_mib]
            container.stop()
        if not presigned:
            found["container, idle"] = {"MiB": idle_mib}
        found[f"container after {rollouts + 1} rollouts, {how}"] = {"MiB": statistics.median(memory)}
        for state, each in (("first rollout", cold), ("later rollouts", warm)):
            for name in each[0]:
                found[f"{state}, {how}: {name}"] = {"ms": 1000 * statistics.median(one[name] for one in each)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--containers", type=int, default=7)
    parser.add_argument("--rollouts", type=int, default=20, help="of each container, after the first one")
    parser.add_argument("--tokens", type=int, default=16_000, help="of a trajectory")
    parser.add_argument("--agent-s", type=float, default=1.5, help="how long the first agent of a container works")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="one container, to check that the benchmark works")
    args = parser.parse_args()
    if args.smoke:
        args.containers, args.rollouts, args.agent_s = 1, 1, 0.0
    found = measure(args.containers, args.rollouts, args.tokens, args.agent_s)
    for name, figures in found.items():
        print(f"{name:60s}" + "".join(f"{value:10.1f} {unit}" for unit, value in figures.items()))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
