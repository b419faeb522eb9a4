"""Both runtimes against real servers: what each answer means to the dispatcher."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from rollout_backend.config import AgentCoreConfig, HttpConfig
from rollout_backend.dispatch.agentcore import AgentCoreRuntime
from rollout_backend.dispatch.http import SESSION_HEADER, HttpRuntime
from rollout_backend.errors import (
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    Rejected,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.local.cloud import LocalRuntime
from rollout_backend.local.sessions import Limits

APP = """
import json, os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200, b'{"status": "HealthyBusy", "time_of_last_update": 1}')
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(*((500, b"broken") if b"fail" in body else (200, b'{"status": "accepted"}')))
    def log_message(self, *_): pass
ThreadingHTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Handler).serve_forever()
"""


def session() -> str:
    return f"rollout-{uuid.uuid4().hex}"


# --- AgentCore --------------------------------------------------------------------------------------------

OpenAgentCore = Callable[..., Awaitable[tuple[AgentCoreRuntime, LocalRuntime]]]


@pytest.fixture
async def open_agentcore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenAgentCore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
    agent = tmp_path / "agent.py"
    agent.write_text(APP)
    async with AsyncExitStack() as stack:

        async def open_(**limits: float) -> tuple[AgentCoreRuntime, LocalRuntime]:
            local = LocalRuntime(agent, run_dir=tmp_path, env={}, limits=Limits(**limits), preload=False)
            await stack.enter_async_context(local)
            config = AgentCoreConfig(arn=local.arn, endpoint_url=local.endpoint_url, read_timeout_s=30)
            runtime = await AgentCoreRuntime.open(config)
            stack.push_async_callback(runtime.aclose)
            return runtime, local

        yield open_


async def test_a_session_is_opened_used_and_stopped(open_agentcore):
    runtime, local = await open_agentcore()
    await runtime.check()
    name = session()
    assert json.loads(await runtime.invoke(name, b"{}")) == {"status": "accepted"}
    assert [item["id"] for item in (await local.sessions())["sessions"]] == [name]
    await runtime.stop(name)
    await runtime.stop(name)  # gone already: a success
    await runtime.stop(session())  # never there: a success too
    assert (await local.sessions())["sessions"] == []


async def test_agentcores_errors_by_what_may_be_done(open_agentcore):
    runtime, local = await open_agentcore(max_sessions=1)
    with pytest.raises(Rejected) as caught:
        await runtime.invoke(session(), b'{"do": "fail"}')
    assert caught.value.reason == "container_error"
    with pytest.raises(QuotaExceeded, match="ServiceQuotaExceededException"):
        await runtime.invoke(session(), b"{}")
    with pytest.raises(Rejected, match="valid min length: 33"):
        await runtime.invoke("too-short", b"{}")
    await local.stop()
    with pytest.raises(RuntimeUnavailable):
        await runtime.invoke(session(), b"{}")
    with pytest.raises(RuntimeUnavailable):
        await runtime.stop(session())


async def test_agentcores_throttling(open_agentcore):
    runtime, _ = await open_agentcore(invoke_per_s=1, stop_per_s=1)
    name = session()
    for call in (runtime.invoke(name, b"{}") for _ in range(5)), (runtime.stop(name) for _ in range(5)):
        answers = await asyncio.gather(*call, return_exceptions=True)
        assert {type(answer) for answer in answers if isinstance(answer, Exception)} == {Throttled}


async def test_agentcores_runtime_that_does_not_exist(open_agentcore):
    _, local = await open_agentcore()
    arn = local.arn.replace("local-", "other-")
    other = await AgentCoreRuntime.open(AgentCoreConfig(arn=arn, endpoint_url=local.endpoint_url))
    try:
        with pytest.raises(PreflightError, match=r"does not exist.*runtime\.arn"):
            await other.check()
        with pytest.raises(Rejected) as caught:
            await other.invoke(session(), b"{}")
        assert caught.value.reason == "runtime_not_found"
    finally:
        await other.aclose()


async def test_an_invoke_that_is_cut_off_has_an_unknown_outcome(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    arn = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/local-0123456789"
    runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=arn, endpoint_url=f"http://127.0.0.1:{port}"))
    try:
        with pytest.raises(OutcomeUnknown):
            await runtime.invoke(session(), b"{}")
    finally:
        await runtime.aclose()
        server.close()


# --- HTTP -------------------------------------------------------------------------------------------------


@pytest.fixture
async def http_runtime() -> AsyncIterator[HttpRuntime]:
    """Answers with the status that the payload names."""

    async def answer(request: web.Request) -> web.Response:
        wanted = json.loads(await request.read())
        if wanted == "hang up":
            assert request.transport is not None
            request.transport.close()
        if wanted == "hang":
            await asyncio.sleep(5)
        return web.Response(status=wanted, text=request.headers[SESSION_HEADER])

    async def ping(request: web.Request) -> web.Response:
        return web.json_response({"status": "Healthy"})

    app = web.Application()
    app.add_routes([web.post("/invocations", answer), web.get("/ping", ping)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    runtime = await HttpRuntime.open(HttpConfig(url=f"http://127.0.0.1:{port}/", read_timeout_s=2.0))
    yield runtime
    await runtime.aclose()
    await runner.cleanup()


async def test_http_answers_with_the_containers_body(http_runtime):
    await http_runtime.check()
    name = session()
    assert await http_runtime.invoke(name, b"200") == name.encode()
    await http_runtime.stop(name)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"429", Throttled),
        (b"402", QuotaExceeded),
        (b"409", RuntimeConflict),
        (b"503", RuntimeUnavailable),
        (b"500", Rejected),
        (b"404", Rejected),
        (b'"hang up"', OutcomeUnknown),
        (b'"hang"', OutcomeUnknown),
    ],
)
async def test_http_errors_by_what_may_be_done(http_runtime, payload, kind):
    with pytest.raises(kind):
        await http_runtime.invoke(session(), payload)


async def test_http_never_invokes_on_a_connection_that_the_server_may_be_closing():
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the first request of a connection, and hangs up at whatever else comes on it."""
        connections.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    connections: list[asyncio.Task[None] | None] = []
    server = await asyncio.start_server(once, "127.0.0.1", 0)
    runtime = await HttpRuntime.open(HttpConfig(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    try:
        assert [await runtime.invoke(session(), b"{}") for _ in range(3)] == [b"ok"] * 3
    finally:
        await runtime.aclose()
        server.close()
        await asyncio.wait(connections)


async def test_http_servers_that_are_not_there():
    runtime = await HttpRuntime.open(HttpConfig(url="http://127.0.0.1:9"))
    try:
        with pytest.raises(PreflightError, match=r"start it, or mend runtime\.url"):
            await runtime.check()
        with pytest.raises(RuntimeUnavailable):
            await runtime.invoke(session(), b"{}")
    finally:
        await runtime.aclose()
