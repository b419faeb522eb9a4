"""Measure what a wrapper adds to an agent's container: `python benchmarks/wrapper.py`.

- import: CPU time and peak memory of a new Python process that imports the wrapper and its server. The floor imports
  only what ours is made of.
- start: from the start of the container's process until it answers a ping.
- invoke: from sending an invoke until the agent's first model call has arrived.
- return: from the agent's return until the result, with its trajectory, is written to S3, and until it is announced.

A container runs its first rollout cold, as on a runtime with one container per session, and then more of them. One
local server stands in for the gateway, S3 and SQS, and answers without delay. Times are medians.
"""

import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import answers, arguments, compare, half_sampled, resident_bytes
from http_server import Answer, Request, Response, listen
from rivals.environments import environment, python_of

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    ResultTarget,
    ResultUrls,
    Rollout,
    RolloutRequest,
    Sampling,
    Trajectory,
)
from rollout_backend.model.serving.server_process import free_port

TOKENS = 16_000  # of a trajectory
FLOOR = """
import asyncio, msgpack, pydantic, starlette.applications, uvicorn, zstandard
type("Model", (pydantic.BaseModel,), {})
"""
COST = """
import json, resource, time
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"CPU, ms": 1000 * time.process_time(), "MiB": used.ru_maxrss / 1024}))
"""
AGENT = """
import http.client, time

def roll_out(address, key, seconds):
    connection = http.client.HTTPConnection(address)
    connection.request("POST", "/v1/chat/completions", b"{}", {"Authorization": "Bearer " + key})
    connection.getresponse().read()
    connection.close()
    time.sleep(seconds)
    return time.monotonic()
"""
OURS = """
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
def agent(context):
    seconds = context.payload["seconds"]
    return {"reward": 1.0, "returned": roll_out(context.base_url.split("/")[2], context.api_key, seconds)}

app.run(host="127.0.0.1")
"""
TOOLKIT = """
import os
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
def agent(payload, context):
    return {"rewards": [1.0], "returned": roll_out(payload["_rollout"]["base_url"], "key", payload["seconds"])}

app.run(port=int(os.environ["PORT"]), host="127.0.0.1")
"""


def ours(url: str) -> dict[str, Any]:
    return _request(url, ResultTarget(bucket="results", queue_url=f"{url}/0/queue", region="us-east-1"))


def ours_with_urls(url: str) -> dict[str, Any]:
    urls = ResultUrls(result=f"{url}/results/a", failure_marker=f"{url}/results/b", artifacts=f"{url}/results/c")
    return _request(url, ResultTarget(bucket="results", urls=urls))


def _request(url: str, target: ResultTarget) -> dict[str, Any]:
    number = os.urandom(4).hex()
    request = RolloutRequest(
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
    return {REQUEST_FIELD: request.model_dump(mode="json")}


def toolkit(url: str) -> dict[str, Any]:
    fields = {"exp_id": "benchmark", "input_id": os.urandom(4).hex(), "s3_bucket": "results"}
    return {"_rollout": {**fields, "base_url": url.removeprefix("http://")}}


@dataclass(frozen=True)
class Wrapper:
    """A way to wrap an agent: its imports, its agent's source, and the fields of an invoke by the services' URL."""

    imports: str = "import agent_wrapper, starlette.applications, uvicorn\n"
    source: str = OURS
    request: Callable[[str], dict[str, Any]] = ours
    last: str = "announced"  # event of a rollout
    package: str | None = None  # None: this interpreter

    @property
    def python(self) -> str:
        return str(python_of(self.package)) if self.package else sys.executable

    @property
    def env(self) -> dict[str, str]:
        return environment("toolkit" if self.package else "ours")


WRAPPERS = {
    "ours": Wrapper(),
    "ours, presigned URL": Wrapper(request=ours_with_urls, last="stored"),
    "toolkit": Wrapper(
        "from agentcore_rl_toolkit import AgentCoreRLApp\n", TOOLKIT, toolkit, "stored", "agentcore-rl-toolkit"
    ),
}


class Services:
    """The gateway, S3 and SQS on one port of a thread, which note when a rollout reaches them."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self._trajectory = Trajectory(model="m", segments=(half_sampled(range(TOKENS)),)).encode()
        self.at: dict[str, float] = {}  # seconds of the machine's monotonic clock, by event
        self.published = threading.Event()
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        server = asyncio.run_coroutine_threadsafe(listen(self._handle), loop).result()
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _handle(self, request: Request, answer: Answer) -> None:
        now, body = time.monotonic(), b"{}"
        if request.method == "PUT":
            self.at.setdefault("stored", now)
            result = json.loads(request.body) if self.wrapper.package else Rollout.decode(request.body).extras
            self.at["returned"], body = result["returned"], b""
        elif request.path.endswith("/chat/completions"):
            self.at.setdefault("called", now)
        elif request.path == "/trajectory":
            body = self._trajectory
        elif request.method == "POST":  # SQS
            self.at.setdefault("announced", now)
            digest = hashlib.md5(json.loads(request.body)["MessageBody"].encode()).hexdigest()
            body = json.dumps({"MessageId": "1", "MD5OfMessageBody": digest}).encode()
        answer(Response(200, (body,)), 0)
        if self.wrapper.last in self.at:
            self.published.set()


class Container:
    """A wrapped agent in a process."""

    def __init__(self, services: Services) -> None:
        self._services, wrapper, port = services, services.wrapper, free_port()
        self._url = f"http://127.0.0.1:{port}"
        env = {**wrapper.env, "PORT": str(port), "AWS_ENDPOINT_URL": services.url}
        argv = [wrapper.python, "-c", AGENT + wrapper.source]
        began = time.monotonic()
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not answers(f"{self._url}/ping"):
            time.sleep(0.001)
        self.start_ms = 1000 * (time.monotonic() - began)

    @property
    def memory_mib(self) -> float:
        return resident_bytes(self.process.pid) / 2**20

    def roll_out(self, agent_s: float) -> dict[str, float]:
        """Run one rollout. Return its figures."""
        services = self._services
        services.at.clear()
        services.published.clear()
        body = json.dumps({"seconds": agent_s, **services.wrapper.request(services.url)}).encode()
        asked = urllib.request.Request(f"{self._url}/invocations", body, {"Content-Type": "application/json"})
        sent = time.monotonic()
        urllib.request.urlopen(asked, timeout=30).close()
        assert services.published.wait(30), "the result was not published"
        at = {event: 1000 * (moment - sent) for event, moment in services.at.items()}
        figures = {
            "invoke to first model call, ms": at["called"],
            "return to stored, ms": at["stored"] - at["returned"],
        }
        if "announced" in at:
            figures["return to announced, ms"] = at["announced"] - at["returned"]
        return figures


def import_cost(wrapper: Wrapper, code: str, repetitions: int) -> dict[str, float]:
    """Return what a new process that runs `code` takes at least."""
    found = []
    for _ in range(repetitions):
        argv = [wrapper.python, "-c", code + COST]
        found.append(json.loads(subprocess.run(argv, env=wrapper.env, capture_output=True, check=True).stdout))
    return {f"import: {unit}": min(one[unit] for one in found) for unit in found[0]}


def measure(wrapper: Wrapper, containers: int, rollouts: int, agent_s: float) -> dict[str, float]:
    """Return figures by their names, which end in the unit. Raises Unmeasured."""
    services = Services(wrapper)
    states: dict[str, list[dict[str, float]]] = {"container": [], "first rollout": [], "later rollouts": []}
    for _ in range(containers):
        container = Container(services)
        figures = {"start to ping, ms": container.start_ms, "idle, MiB": container.memory_mib}
        states["first rollout"].append(container.roll_out(agent_s))
        states["later rollouts"] += [container.roll_out(0) for _ in range(rollouts)]
        states["container"].append({**figures, f"after {rollouts + 1} rollouts, MiB": container.memory_mib})
        container.process.terminate()
        container.process.wait()
    found = import_cost(wrapper, wrapper.imports, 2 * containers)
    for state, each in states.items():
        found |= {f"{state}: {name}": statistics.median(one[name] for one in each) for name in each[0]}
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    containers, rollouts, agent_s = (1, 1, 0.0) if options.smoke else (7, 20, 1.5)

    def one(system: str, _: object) -> dict[str, float]:
        if system == "floor":
            return import_cost(WRAPPERS["ours"], FLOOR, 2 * containers)
        return measure(WRAPPERS[system], containers, rollouts, agent_s)

    compare(options.json, [*WRAPPERS, "floor"], one)


if __name__ == "__main__":
    main()
