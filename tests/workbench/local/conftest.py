"""An AgentCore emulator with a small app, in this process's event loop."""

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agent_servers import ARN, serve_emulator
from builders import session_id
from rollout_backend.base import aws
from rollout_backend.workbench.local.agentcore_emulator import AgentCoreEmulator
from rollout_backend.workbench.local.session_pool import EmulatorLimits

APP = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STATE = {"status": "Healthy", "time_of_last_update": int(time.time())}
SEEN = []

def sigterm(*_):
    print("got SIGTERM", flush=True)
    if not os.environ.get("STUBBORN"):
        os._exit(0)

signal.signal(signal.SIGTERM, sigterm)

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if os.environ.get("MUTE"):
            return self.answer(500, b"{}")
        self.answer(200, json.dumps(STATE).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        SEEN.append(body)
        match body.get("do"):
            case "fail":
                return self.answer(422, b'{"error": "no such task"}')
            case "die":
                print("dying", flush=True)
                os._exit(3)
            case "stream":
                return self.answer(200, b"data: 1\\n\\ndata: 2\\n\\n", "text/event-stream")
            case "busy":
                STATE.update(status="HealthyBusy", time_of_last_update=int(time.time()))
            case "busy, without its time":
                STATE.clear()
                STATE["status"] = "HealthyBusy"
            case "wait":
                time.sleep(600)
            case "child":
                import subprocess
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                return self.answer(200, json.dumps(child.pid).encode())
        self.answer(200, json.dumps({
            "pid": os.getpid(),
            "calls": len(SEEN),
            "main": __name__,
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "env": {name: os.environ.get(name)
                for name in ("GREETING", "HOST", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")},
            "headers": dict(self.headers.items()),
        }).encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Handler).serve_forever()
"""


class ShiftedClock:
    """The clock of the containers, and ahead of it by what tests set."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Runtime:
    """A running emulator with a real client."""

    def __init__(self, plane: AgentCoreEmulator, url: str, client: Any, clock: ShiftedClock) -> None:
        self.plane = plane
        self._clock = clock
        self.url = url
        self.client = client
        self.arn = ARN

    async def invoke(self, session: str, payload: bytes = b"{}", **more: Any) -> dict[str, Any]:
        """An answer with its body."""
        answer = await self.client.invoke_agent_runtime(
            agentRuntimeArn=ARN, runtimeSessionId=session_id(session), payload=payload, **more
        )
        answer["body"] = await answer["response"].read()
        return dict(answer)

    async def seen(self, session: str, payload: bytes = b"{}", **more: Any) -> Any:
        """Return what the app answers: what it saw of the call."""
        return json.loads((await self.invoke(session, payload, **more))["body"])

    async def stop(self, session: str) -> dict[str, Any]:
        return dict(await self.client.stop_runtime_session(agentRuntimeArn=ARN, runtimeSessionId=session_id(session)))

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.plane.pool.snapshot()["counters"])

    @property
    def states(self) -> dict[str, tuple[str, int]]:
        """Status and requests in flight, by session."""
        return {each["id"]: (each["status"], each["requests"]) for each in self.plane.pool.snapshot()["sessions"]}

    @property
    def open(self) -> list[str]:
        return [session["id"] for session in self.plane.pool.snapshot()["sessions"]]

    def pass_time(self, seconds: float) -> None:
        """Let the emulator's clock jump."""
        self._clock.ahead_s += seconds


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text(APP)
    return folder / "agent.py"


StartRuntime = Callable[..., Awaitable[Runtime]]


@pytest.fixture
async def start_runtime(app: Path, tmp_path: Path, local_keys: None) -> AsyncIterator[StartRuntime]:
    """Start an emulator; keyword arguments are its limits, `env` and `preload`."""
    async with AsyncExitStack() as stack:

        async def start(
            env: dict[str, str] | None = None, preload: tuple[str, ...] | None = None, **limits: float
        ) -> Runtime:
            clock = ShiftedClock()
            settings = {
                "command": [sys.executable, str(app)],
                "cwd": app.parent,
                "env": {"PATH": os.environ["PATH"], "GREETING": "hello", **(env or {})},
                "preload": preload,
                "limits": EmulatorLimits(**{"ping_every_s": 0.1, "grace_s": 60.0, **limits}),
            }
            plane, url = await stack.enter_async_context(serve_emulator(tmp_path, clock, **settings))
            opening = aws.client("bedrock-agentcore", region="us-east-1", endpoint_url=url, read_timeout_s=600)
            return Runtime(plane, url, await stack.enter_async_context(opening), clock)

        yield start
