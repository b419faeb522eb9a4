"""Both runtimes against real servers: what each answer means to the step, and the quotas of AgentCore."""

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from botocore.exceptions import ClientError

from agent_servers import ARN, BARE_AGENT, IMAGE, serve_emulator
from builders import eventually, served
from protocol_requests import make_request
from rollout_backend.agents.runtimes.agentcore.account import ACTIVE_SESSIONS, NEW_PER_S, describe_quotas
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime, _to_call_error
from rollout_backend.agents.runtimes.base import AgentRuntime
from rollout_backend.agents.runtimes.http import SESSION_HEADER, HttpRuntime, session_stopper
from rollout_backend.agents.runtimes.kubernetes.runtime import KubernetesRuntime
from rollout_backend.base.check_result import raise_problems
from rollout_backend.config import AgentCoreConfig, HttpConfig, KubernetesConfig
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.testing.runtime_contract import new_session
from rollout_backend.workbench.local.session_pool import EmulatorLimits
from tests.emulators.kubernetes_emulator import write_kubeconfig

# --- AgentCore --------------------------------------------------------------------------------------------


@pytest.fixture
async def open_agentcore(tmp_path: Path, local_keys: None) -> AsyncIterator[Any]:
    """Open a runtime at an emulator with these limits. Without a command, its agent is the bare one."""
    async with AsyncExitStack() as stack:

        async def open_(*command: str, **limits: float) -> AgentCoreRuntime:
            serving = serve_emulator(tmp_path, command=command or BARE_AGENT, limits=EmulatorLimits(**limits))
            _, url = await stack.enter_async_context(serving)
            runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=ARN, endpoint_url=url, read_timeout_s=120))
            return await stack.enter_async_context(aclosing(runtime))

        yield open_


async def test_a_runtime_describes_its_agent_and_another_one_does_not_exist(open_agentcore):
    runtime = await open_agentcore()
    raise_problems(await runtime.check())
    described = {"arn": ARN, "qualifier": "DEFAULT", "version": "1", "image": IMAGE, "platform": "V1"}
    assert runtime.describe() == described
    runtime.arn = ARN.replace("local-", "other-")
    with pytest.raises(PreflightError, match=r"does not exist.*runtime\.arn"):
        raise_problems(await runtime.check())
    with pytest.raises(InvokeRejected) as caught:
        await runtime.invoke(new_session(), b"{}")
    assert caught.value.reason == "runtime_not_found"


async def test_a_runtime_that_ends_sessions_before_their_agents_is_refused(open_agentcore):
    runtime = await open_agentcore(max_life_s=1900)
    with pytest.raises(PreflightError, match=r"after 1900 s \(its maxLifetime\).* 1920 s \(timeouts\.agent_s"):
        raise_problems(await runtime.check(session_s=1920))
    raise_problems(await runtime.check(session_s=1900))


async def test_errors_of_agentcore_are_classified(open_agentcore):
    runtime = await open_agentcore(max_sessions=1)
    with pytest.raises(InvokeRejected) as caught:
        await runtime.invoke(new_session(), b'{"do": "fail"}')
    assert caught.value.reason == "container_error"
    with pytest.raises(QuotaExceeded, match="ServiceQuotaExceededException"):
        await runtime.invoke(new_session(), b"{}")
    with pytest.raises(InvokeRejected, match="33"):
        await runtime.invoke("too-short", b"{}")
    nowhere = AgentCoreConfig(arn=ARN, endpoint_url="http://127.0.0.1:9")
    async with aclosing(await AgentCoreRuntime.open(nowhere)) as runtime:
        with pytest.raises(RuntimeUnavailable):
            await runtime.invoke(new_session(), b"{}")
        with pytest.raises(OutcomeUnknown):  # no refusal: stops do not slow down
            await runtime.stop(new_session())


async def test_a_stop_that_finds_no_session_proves_nothing(open_agentcore):
    runtime, session = await open_agentcore(), new_session()
    await runtime.invoke(session, b"{}")
    assert [await runtime.stop(session), await runtime.stop(session)] == [True, False]


async def test_a_quota_that_invokes_and_stops_share_is_kept(open_agentcore):
    runtime = await open_agentcore(calls_per_s=0.001)
    name = new_session()
    await runtime.invoke(name, b"{}")
    with pytest.raises(Throttled):
        await runtime.stop(name)


async def test_a_container_that_is_not_up_in_time_is_worth_another_attempt(open_agentcore):
    runtime = await open_agentcore("sleep", "60", startup_timeout_s=0.1)
    with pytest.raises(ContainerStartTimeout, match="initialization time exceeded"):
        await runtime.invoke(new_session(), b"{}")


START_TIMEOUT = "Runtime initialization time exceeded. Please make sure it completes in 120s."


@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "refused"),
    [
        (400, "ThrottlingException", "Rate exceeded", Throttled, True),  # as in AWS's list of common errors
        (402, "Any", "", QuotaExceeded, True),
        (408, "Any", "", RuntimeUnavailable, True),
        (409, "Any", "", RuntimeConflict, True),
        (429, "Any", "", Throttled, True),
        (500, "Any", "", RuntimeUnavailable, False),  # the session may be open
        (503, "Any", "", RuntimeUnavailable, True),
        (424, "Any", START_TIMEOUT, ContainerStartTimeout, False),
        (424, "Any", "Received error (500) from runtime.", InvokeRejected, False),
    ],
)
def test_a_refusal_is_classified_by_its_status_or_code(status, code, message, kind, refused):
    error = _to_call_error(refusal(status, code, message))
    assert (type(error), error.refused) == (kind, refused)
    assert kind is not InvokeRejected or error.reason == "container_error"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Signature expired: 10:00 is now earlier than 10:05 (10:10 - 5 min.)", "wrong_clock"),
        ("Signature not yet current: 10:10 is still later than 10:05 (10:00 + 5 min.)", "wrong_clock"),
        ("The request signature we calculated does not match", "access_denied"),
    ],
)
def test_a_clock_that_is_wrong_is_a_refusal_that_names_the_clock(message, reason):
    error = _to_call_error(refusal(403, "InvalidSignatureException", message))
    assert (error.reason, error.refused) == (reason, reason == "wrong_clock")
    assert ("This machine's clock is wrong: synchronise it" in str(error)) == error.refused


def refusal(status: int, code: str, message: str) -> ClientError:
    answer: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "InvokeAgentRuntime")


# --- HTTP -------------------------------------------------------------------------------------------------


@pytest.fixture
async def http_runtime() -> AsyncIterator[HttpRuntime]:
    """Answers an invoke with the status that its payload names, and a stop with the one that its session names."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/stop":
            return web.Response(status=int(request.headers[SESSION_HEADER]))
        wanted = json.loads(await request.read())
        if wanted == "hang up":
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"error": f"as wanted: {wanted}"}, status=wanted)

    async with served(answer) as url:
        runtime = await HttpRuntime.open(HttpConfig(url=f"{url}/", read_timeout_s=120.0))
        yield runtime
        await runtime.aclose()


@pytest.mark.parametrize(
    ("call", "given", "kind"),
    [
        ("invoke", b"402", QuotaExceeded),
        ("invoke", b"409", RuntimeConflict),
        ("invoke", b"500", InvokeRejected),
        ("invoke", b'"hang up"', OutcomeUnknown),
        ("stop", "408", RuntimeUnavailable),
        ("stop", "520", RuntimeUnavailable),
        ("stop", "501", InvokeRejected),
    ],
)
async def test_http_errors_are_classified(http_runtime, call, given, kind):
    with pytest.raises(kind, match=given if call == "stop" else None):
        await (http_runtime.invoke(new_session(), given) if call == "invoke" else http_runtime.stop(given))


async def test_http_an_answer_that_does_not_come_leaves_the_outcome_unknown():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = HttpConfig(url=f"http://127.0.0.1:{silent.getsockname()[1]}", read_timeout_s=0.1)
        runtime = await HttpRuntime.open(config)
        with pytest.raises(OutcomeUnknown):
            await runtime.invoke(new_session(), b"{}")
        await runtime.aclose()


@pytest.mark.parametrize("kind", ["http", "kubernetes", "agentcore"])
async def test_a_connect_that_times_out_opened_no_session(kind, local_keys, tmp_path):
    """The accept queue is full, so the kernel drops what asks for a connection, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        runtime: AgentRuntime
        if kind == "http":
            runtime = await HttpRuntime.open(HttpConfig(url=url, connect_timeout_s=0.2))
        elif kind == "agentcore":
            runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=ARN, endpoint_url=url, connect_timeout_s=0.2))
        else:
            kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", {"server": url}, {"token": "t"})
            config = KubernetesConfig(image="agent:1", kubeconfig=kubeconfig, connect_timeout_s=0.2)
            runtime = await KubernetesRuntime.open(config)
        payload = json.dumps({"_rollout": make_request().model_dump(mode="json")}).encode()
        with pytest.raises(RuntimeUnavailable) as caught:
            await runtime.invoke(new_session(), payload)
        assert caught.value.refused
        assert caught.value.never_opened
        await runtime.aclose()
        for each in waiting:
            each.close()


async def test_http_a_server_that_cannot_stop_sessions_is_not_asked():
    runtime = await HttpRuntime.open(HttpConfig(url="http://127.0.0.1:9", can_stop=False))
    await runtime.stop(new_session())
    assert runtime.cleanup_spec() is None
    await runtime.aclose()


@pytest.mark.parametrize("status", [301, 303, 307])
async def test_http_follows_no_redirect(status, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    reached = set()

    async def redirect(request: web.Request) -> web.Response:
        reached.add(request.path)
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with served(redirect) as url:
        runtime = await HttpRuntime.open(HttpConfig(url=url, token="t" * 32))
        options = runtime.cleanup_spec().options
        calls = [runtime.check(), runtime.invoke(new_session(), b"{}"), runtime.stop(new_session())]
        for call in [*calls, asyncio.to_thread(session_stopper(options), new_session())]:
            with pytest.raises((PreflightError, RuntimeUnavailable), match="elsewhere"):
                await call
        await runtime.aclose()
    assert reached == {"/ping", "/invocations", "/stop"}


async def test_http_never_invokes_on_a_connection_that_the_server_may_be_closing():
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the first request of a connection, and hangs up at any further byte."""
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
        assert [await runtime.invoke(new_session(), b"{}") for _ in range(3)] == [b"ok"] * 3
    finally:
        await runtime.aclose()
        server.close()
        await asyncio.wait(connections)


@pytest.mark.parametrize("kind", [AgentCoreRuntime, HttpRuntime])
async def test_silent_containers_leave_connections_to_stops(kind, local_keys):
    asked, sessions = [], 300

    async def answer(request: web.Request) -> web.Response:
        if "stop" not in request.path:
            asked.append(request.path)
            await asyncio.Event().wait()
        return web.json_response({})

    async with served(answer, handler_cancellation=True) as url:
        where = {"arn": ARN, "endpoint_url": url} if kind is AgentCoreRuntime else {"url": url}
        settings = AgentCoreConfig if kind is AgentCoreRuntime else HttpConfig
        runtime = await kind.open(settings(**where, max_sessions=sessions))
        invokes = [asyncio.create_task(runtime.invoke(new_session(), b"{}")) for _ in range(sessions)]
        await eventually(lambda: len(asked) >= 256)
        async with asyncio.timeout(60):
            await runtime.stop(new_session())
        for invoke in invokes:
            invoke.cancel()
        await asyncio.gather(*invokes, return_exceptions=True)
        await runtime.aclose()


# --- answers that are cut, and answers without an end -----------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = b'{"status": "accepted"}'


@pytest.fixture(params=["agentcore", "http"])
async def answering(request, local_keys) -> AsyncIterator[Callable[..., Awaitable[AgentRuntime]]]:
    """A runtime of each kind at a server that answers an invoke with these bytes and hangs up."""
    async with AsyncExitStack() as stack:

        async def open_(answer: Iterable[bytes], reset: bool = False) -> AgentRuntime:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1]))
                with contextlib.suppress(ConnectionError):
                    for piece in answer:
                        writer.write(piece)
                        await writer.drain()
                if reset:
                    connection = writer.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.transport.abort()
                writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            stack.callback(server.close)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            if request.param == "http":
                runtime: AgentRuntime = await HttpRuntime.open(HttpConfig(url=url))
            else:
                runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=ARN, endpoint_url=url))
            stack.push_async_callback(runtime.aclose)
            return runtime

        yield open_


@pytest.mark.parametrize(
    ("sent", "reset"),
    [
        (b"", False),
        (b"", True),
        (HEAD + b"Content-Length: 22\r\n\r\n" + WHOLE[:9], False),
        (HEAD + b"Content-Length: 22\r\n\r\n" + WHOLE[:9], True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n16\r\n" + WHOLE[:9], False),
        (HEAD + b"\r\n" + WHOLE[:9], False),
    ],
    ids=["no head", "reset, no head", "in the body", "reset in the body", "in a chunk", "without a length"],
)
async def test_an_invoke_whose_answer_is_cut_has_an_unknown_outcome(answering, sent, reset):
    runtime = await answering([sent], reset)
    with pytest.raises(OutcomeUnknown):
        await runtime.invoke(new_session(), b"{}")


async def test_a_whole_answer_needs_no_length(answering):
    assert await (await answering([HEAD + b"\r\n" + WHOLE])).invoke(new_session(), b"{}") == WHOLE


async def test_64_kib_of_an_answer_are_read(answering):
    sent = 0

    def without_an_end():
        nonlocal sent
        yield HEAD + b"Content-Length: 1000000000\r\n\r\n"
        while sent < 1_000_000_000:
            sent += 65536
            yield b"x" * 65536

    runtime = await answering(without_an_end())
    assert await runtime.invoke(new_session(), b"{}") == b"x" * 65536
    assert sent < 100_000_000, "the rest stays where it is"


# --- quotas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "settings", "quotas", "level", "words"),
    [
        ("us-east-1", {}, {ACTIVE_SESSIONS: 5000.0, NEW_PER_S: 25.0}, "ok", "5,000 active sessions and 25 new"),
        ("us-east-1", {}, {ACTIVE_SESSIONS: 1000.0}, "warning", "runtime.max_sessions=5000 is above 1000 active"),
        ("us-east-1", {"invoke_per_s": 50}, {NEW_PER_S: 25.0}, "warning", "invoke_per_s=50 is above 25 new"),
        (
            "us-east-1",
            {},
            {NEW_PER_S: 25.0, "L-0B3AF7ED": 400.0},
            "warning",
            "is above 6.7 new containers per second",
        ),
        ("us-east-1", {"invoke_per_s": 6.5}, {NEW_PER_S: 25.0, "L-0B3AF7ED": 400.0}, "ok", "25 new ones per second"),
        ("us-east-1", {}, {ACTIVE_SESSIONS: 0.0}, "problem", "ask AWS Support"),
        ("eu-west-1", {}, {"L-OTHER": 1.0}, "unchecked", "defaults of November 2026 are 2,500 active sessions"),
    ],
)
def test_a_runs_limits_and_the_accounts_quotas(region, settings, quotas, level, words):
    found = describe_quotas(AgentCoreConfig(arn=ARN.replace("us-east-1", region), **settings), quotas)
    assert (found.level, found.fields()["id"]) == (level, "runtime-quotas")
    assert words in str(found)
