"""What one session, or a connection without a request, may use of a gateway."""

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import tracemalloc
import zlib
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
import zstandard

from agent_wrapper import RolloutApp
from builders import function_tool, until, user
from gateway_server import CONTROL_KEY, SECRET, ServerThread
from rollout_backend.base.waiting_connections import WaitingConnections
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.gateway import cpu_shares, session_share
from rollout_backend.model.gateway.__main__ import server_options
from rollout_backend.model.gateway.access import MAX_HEAD_BYTES, bounded_protocol
from rollout_backend.model.gateway.cpu_shares import CpuShares
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.model_call_executor import CallRenderer
from rollout_backend.model.gateway.session_share import MAX_REQUESTS, SessionShare, decompress, is_brief
from rollout_backend.model.gateway.sessions import registry
from rollout_backend.model.model_call import ApiError

CALL = {"model": "scripted", "messages": [user("What is 2 + 3?")]}
MANY = [user("a")] * 1_000
CALLING = {"role": "assistant", "tool_calls": [{"id": "x" * 50_000, "function": {"name": "x" * 50_000}}]}
OVERFLOW = "This model's maximum context length is 4096 tokens, and "  # the start of it is what LiteLLM recognises


@pytest.fixture
def connect():
    """`connect(server)` is a connection."""
    opened = []

    def start(server) -> socket.socket:
        host, port = server.url.removeprefix("http://").split(":")
        opened.append(socket.create_connection((host, int(port)), timeout=60))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


async def app(scope, receive, send) -> None:
    """Answer once the body is complete."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def bounded():
    with ServerThread(app, http=bounded_protocol(4, head_s=60), ws="none") as server:
        yield server


def begin(connection, gateway, path, size, body=b"", session="s1"):
    """Send the head of a request, and the start of its body of this size."""
    [key] = gateway.headers(session).values()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nAccept: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD, b"X-A: " + b"a" * 8000 + b"\r\n"),
        (HEAD + b"X-A: ", b"a" * 8000),
        (b"", b"\r\n" * 4000),
        (b"POST /", b"a" * 8000),
        (CHUNKED + b"0\r\n", b"X-A: " + b"a" * 8000 + b"\r\n"),
        (CHUNKED + b"1;", b"a" * 8000),
    ],
    ids=["headers", "one header", "empty lines", "the path", "trailers", "the extension of a chunk"],
)
def test_the_head_of_a_request_is_bounded(bounded, connect, begin, more):
    connection = connect(bounded)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(begin + more * (100 * MAX_HEAD_BYTES // len(more)))


def test_a_head_has_a_limited_number_of_fields(bounded, connect):
    for fields, answer in ((200, b"HTTP/1.1 200 "), (300, b"HTTP/1.1 431 ")):
        connection = connect(bounded)
        connection.sendall(HEAD + b"a: b\r\n" * fields + b"Content-Length: 1\r\n\r\na")
        assert connection.recv(1000).startswith(answer)


def test_a_body_in_tiny_chunks_is_read(bounded, connect):
    connection = connect(bounded)
    connection.sendall(CHUNKED + b"1\r\na\r\n" * 40_000 + b"0\r\n\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_requests_on_one_connection_wait_in_a_limited_number(connect):
    go, begun = threading.Event(), []

    async def slow(scope, receive, send) -> None:
        if scope["type"] == "http":
            begun.append(scope)
            await asyncio.to_thread(go.wait, 60)
            await app(scope, receive, send)

    request = HEAD + b"Content-Length: 1\r\n\r\na"
    with ServerThread(slow, http=bounded_protocol(4, head_s=60), ws="none") as server:
        few, many = connect(server), connect(server)
        few.sendall(request * 10)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            many.sendall(request * 100)
            assert many.recv(1000) == b""
        go.set()
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 10:
            received += few.recv(1000)
    assert len(begun) <= 12


def test_a_request_that_offers_http_2_is_read_with_its_body(play):
    gateway = play(["5", "6"])
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    with httpx.Client(headers=gateway.headers() | offer, timeout=120) as client:
        for reply in ("5", "6"):
            answer = client.post(f"{gateway.url}/v1/chat/completions", json=CALL)
            assert answer.json()["choices"][0]["message"]["content"] == reply


def test_a_new_connection_replaces_the_one_that_is_silent_longest(bounded, connect):
    kept = connect(bounded)
    kept.sendall(HEAD + b"Content-Length: 0\r\n\r\n")
    assert kept.recv(1000).startswith(b"HTTP/1.1 200 ")
    silent = [connect(bounded) for _ in range(4)]
    assert silent[0].recv(1) == b""
    assert httpx.get(bounded.url, timeout=120).status_code == 200
    kept.sendall(HEAD + b"Content-Length: 0\r\n\r\n")
    assert kept.recv(1000).startswith(b"HTTP/1.1 200 ")


async def test_a_burst_of_connections_is_limited_too():
    """The event loop reports many new connections, before it reports that an aborted one is lost."""
    waiting, aborted = WaitingConnections(4), []
    burst = [Mock(**{"abort.side_effect": lambda i=i: aborted.append(i)}) for i in range(10)]
    for each in burst:
        waiting.opened(each)
    assert aborted == [*range(6)]
    for each in burst:
        waiting.closed(each)


def test_a_connection_without_a_request_is_closed(connect):
    with ServerThread(app, http=bounded_protocol(4, head_s=0.01), ws="none") as server:
        assert connect(server).recv(1) == b""
        half = connect(server)
        half.sendall(HEAD)
        assert half.recv(1) == b""


@pytest.mark.parametrize("limits", [{"connections": 1}, {"connections": 4, "read_s": 0.01}], ids=["number", "time"])
def test_clients_that_do_not_read_their_answers_are_limited(connect, limits):
    begun, ended = threading.Event(), threading.Event()

    async def endless(scope, receive, send) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        if scope["type"] == "http" and scope["path"] == "/endless":
            left = asyncio.create_task(gone())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            begun.set()
            while not left.done():
                await send({"type": "http.response.body", "body": b"a" * MAX_HEAD_BYTES, "more_body": True})
                await asyncio.sleep(0)
            ended.set()
        else:
            await app(scope, receive, send)

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(server.url, timeout=60).status_code == 200
        return False

    protocol = bounded_protocol(**{"head_s": 60, "read_s": 3600, **limits})
    with ServerThread(endless, http=protocol, ws="none") as server, connect(server) as stalled:
        stalled.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert begun.wait(60)
        until(answers)
        assert ended.wait(60)


def test_idle_connections_outlive_every_load_balancer(byte_model, monkeypatch):
    settings = GatewaySettings(
        port=1, engine_url="http://127.0.0.1:1", secret=SECRET, control_key=CONTROL_KEY, model=byte_model
    )
    served = [uvicorn.Config(app, **server_options(settings))]
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.append(uvicorn.Config(app, **options)))
    wrapper = RolloutApp()
    wrapper.entrypoint(lambda context: 1.0)
    wrapper.run(port=1)
    described = (Path(__file__).parents[3] / "infra/network.yaml").read_text().partition("CallTimeoutSeconds:")[2]
    longest = int(described.partition("MaxValue:")[2].split()[0])
    assert [config.timeout_keep_alive > longest for config in served] == [True, True]


# --- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [user("x" * 2_000_000)]}, f"{OVERFLOW}the request has more than"),
        ({"messages": [user("x" * 100_000)]}, f"{OVERFLOW}the messages have more"),
        ({"messages": MANY}, f"{OVERFLOW}1000 messages have more"),
        ({"messages": [user("a")] * 20_001}, "maps and lists"),
        ({"tools": [function_tool("f", "x" * 100_000)]}, f"{OVERFLOW}the messages have more"),
        ({"stop": ["x" * 1001]}, "a stop string has more than 1000 characters"),
        ({"messages": [CALLING, user("a")]}, f"{OVERFLOW}the messages have more"),
    ],
    ids=["bytes", "text", "messages", "objects", "tools", "stop strings", "names of calls"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_what_cannot_fit_into_the_context_is_refused_early(play, path, change, said):
    if path.endswith("count_tokens") and ("stop" in change or CALLING in change.get("messages", ())):
        return
    gateway = play(["never"])
    if "tools" in change and path.endswith("count_tokens"):
        change = {"tools": [{"name": "f", "description": "x" * 100_000, "input_schema": {"type": "object"}}]}
    answer = httpx.post(gateway.url + path, json={**CALL, **change}, headers=gateway.headers(), timeout=60)
    assert answer.status_code == 400
    assert said in answer.text
    assert gateway.engine.requests == []


def test_large_bodies_of_a_session_are_read_one_at_a_time(play, connect):
    gateway = play(["ok"], body_s=60)
    for _ in range(8):
        begin(connect(gateway), gateway, "/v1/chat/completions", 900_000, b" " * 200_000, "busy")
    assert gateway.post(CALL, "busy").status_code == 200
    assert gateway.post(CALL, "another").status_code == 200


def raw_deflate(body: bytes) -> bytes:
    packed = zlib.compressobj(wbits=-15)
    return packed.compress(body) + packed.flush()


PACKERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstandard.compress,
    "identity": bytes,
}


@pytest.mark.parametrize("size", [1, 300_000], ids=["brief", "large"])
@pytest.mark.parametrize("encoding", PACKERS)
def test_a_compressed_body_is_read(play, encoding, size):
    gateway = play(["5"])
    body = json.dumps({**CALL, "metadata": {"a": "x" * size}}).encode()
    answer = gateway.post(PACKERS[encoding](body), headers={"Content-Encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", b"\x0b\x02\x80", 415),
        ("gzip, zstd", gzip.compress(zstandard.compress(b"{}"), mtime=0), 415),
        ("gzip", b"{}", 400),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-9], 400),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400),
        ("deflate", zlib.compress(b"{}") + b"more", 400),
        ("zstd", b"\x28\xb5\x2f\xfd\x00", 400),
        ("zstd", b"{}", 400),
    ],
)
def test_a_body_that_cannot_be_decompressed_names_the_header(shared_gateway, encoding, body, status):
    answer = shared_gateway.post(body, headers={"Content-Encoding": encoding})
    assert (answer.status_code, "content-encoding" in answer.text) == (status, True), answer.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_decompression_bomb_is_refused_in_bounded_memory(encoding):
    bomb = PACKERS[encoding](b"a" * 2**26)
    tracemalloc.start()
    try:
        assert len(decompress(bomb, encoding, 10_000)) == 10_001
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_body_that_does_not_arrive_is_answered_408(play, connect):
    gateway = play(["ok"], body_s=0.05)
    connection = connect(gateway)
    begin(connection, gateway, "/v1/messages", 9, b"{")
    assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_session_that_is_sealed_while_a_body_is_read_makes_no_call(play, connect):
    gateway = play(["never"], gateway={})
    body, connection = json.dumps(CALL).encode(), connect(gateway)
    begin(connection, gateway, "/v1/chat/completions", len(body), body[:-1])
    until(lambda: gateway.stats().sessions_open == 1)
    gateway.seal().raise_for_status()
    connection.sendall(body[-1:])
    assert connection.recv(1000).startswith(b"HTTP/1.1 410 ")
    assert gateway.engine.requests == []


@pytest.mark.parametrize(
    ("body", "brief"),
    [
        (b"64 bases of 64", True),
        (rb"caf\u00e9", True),
        (b"data:image/png;base64,iVBO", False),
        (b"data:image/png;BaSe64,iVBO", False),
        (rb"b\u0061se64", False),
        (b"{" * 1000, False),
        (b"x" * 200_000, False),
    ],
)
def test_images_and_large_bodies_are_not_parsed_on_the_event_loop(body, brief):
    assert is_brief(body) is brief


@pytest.mark.parametrize("size", [1, 300_000], ids=["brief", "large"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_the_body_of_a_request_is_searched_for_images_once(play, monkeypatch, path, size):
    searched = []
    monkeypatch.setattr(session_share, "is_brief", lambda body: searched.append(body) or is_brief(body))
    gateway = play(["5"])
    body = {**CALL, "messages": [user("2 + 3?")], "metadata": {"a": "x" * size}}
    httpx.post(gateway.url + path, json=body, headers=gateway.headers(), timeout=60).raise_for_status()
    assert len(searched) == (size == 1)


def test_only_the_new_end_of_a_long_conversation_is_parsed_and_rendered_on_the_event_loop(play, monkeypatch):
    parsed, prepared = [], []
    parse, prepare = OpenAIChat.parse, CallRenderer.prepare

    def parse_seen(dialect, body):
        parsed.append((len(body) > 100_000, threading.current_thread().name.startswith("parser")))
        return parse(dialect, body)

    def prepare_seen(renderer, conversations, call):
        prepared.append(len(call.messages))
        return prepare(renderer, conversations, call)

    monkeypatch.setattr(OpenAIChat, "parse", parse_seen)
    monkeypatch.setattr(CallRenderer, "prepare", prepare_seen)
    gateway = play(["one", "two", "three", "four"])
    blanks = " " * 150_000
    texts = [json.dumps(user("2 + 3?")).replace("{", "{" + blanks)]

    def ask(more: str) -> None:
        body = f'{{"model": "scripted", "messages": [{", ".join(texts)}]}}'
        reply = httpx.post(f"{gateway.url}/v1/chat/completions", content=body, headers=gateway.headers(), timeout=60)
        texts.append(json.dumps(reply.raise_for_status().json()["choices"][0]["message"]))
        texts.append(more)

    ask(json.dumps(user("And now?")))
    ask(json.dumps(user("And now?")).replace("{", "{" + blanks))
    ask(json.dumps(user("And now?")))
    texts[0] = texts[0].replace("3", "4")
    ask("")
    whole = (True, True)
    assert parsed == [whole, (False, False), whole, whole]
    assert prepared == [1, 5, 7]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_requests_of_a_session_wait_unread_behind_its_earlier_ones(play, connect, in_thread, path):
    gateway = play(lambda _: "ok", gateway={"max_session_calls": 2}, body_s=600)
    call = {**CALL, "max_tokens": 5}
    held = [connect(gateway) for _ in range(2)]
    for connection in held:
        begin(connection, gateway, path, 9, b"{")
    until(lambda: gateway.stats().sessions_open == 1)
    waiting = in_thread(gateway.post, call, path=path)
    assert gateway.post(call, "another", path=path).status_code == 200
    assert not waiting.done()
    held[0].close()
    assert waiting.result(120).status_code == 200


def test_a_session_has_a_limited_number_of_open_requests():
    share = SessionShare()
    with contextlib.ExitStack() as held:
        for _ in range(MAX_REQUESTS):
            held.enter_context(share.request())
        with pytest.raises(ApiError, match="1024 requests open") as refused, share.request():
            pass
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    with share.request():
        pass


@pytest.mark.parametrize(
    ("method", "path", "status", "free"),
    [
        ("GET", "/v1/models", 200, 1),
        ("GET", "/v1/models/another", 404, 0),
        ("GET", "/v1/nothing", 404, 1),
        ("POST", "/v1/rollout/trajectory", 200, 0),
        ("POST", "/v1/rollout/heartbeat", 204, 2),
        ("POST", "/v1/chat/completions", 400, 0),
        ("POST", "/v1/complete-rollout", 400, 1),
    ],
)
def test_each_request_waits_until_its_session_has_paid_for_the_earlier_ones(
    serve, monkeypatch, method, path, status, free
):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    for name in ("_CALL_S", "_REQUEST_S"):
        monkeypatch.setattr(cpu_shares, name, 5.0)
    monkeypatch.setattr(registry, "CpuShares", partial(CpuShares, sleep=sleep))
    gateway = serve()

    def statuses(session: str, number: int, **key) -> list[int]:
        headers = gateway.headers(session, **key)
        return [
            httpx.request(method, gateway.url + path, headers=headers, timeout=120).status_code for _ in range(number)
        ]

    assert statuses("s1", free) == [status] * free
    assert not waits
    assert statuses("s1", 1) == [status]
    assert waits
    waits.clear()
    # Requests without a valid key share one part.
    assert {*statuses("s2", 1, secret="x" * 32), *statuses("s3", 1, secret="x" * 32)} <= {400, 401, 404}
    assert len(waits) == 1


@pytest.fixture
def paced(serve, monkeypatch):
    """A gateway whose requests cost 5 s each, and the pauses that it makes."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(cpu_shares, "_REQUEST_S", 5.0)
    monkeypatch.setattr(registry, "CpuShares", partial(CpuShares, sleep=sleep))
    gateway = serve()
    waits.clear()
    return gateway, waits


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/health", 200), ("GET", "/v1", 200), ("OPTIONS", "/v1/messages", 204)]
)
def test_many_probes_wait_for_a_moment(paced, method, path, status):
    gateway, waits = paced
    for key in ("a", "b"):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.request(method, gateway.url + path, headers=headers, timeout=120).status_code == status
    assert waits == [0.5, 0.5]


def test_the_trainers_own_probes_do_not_wait(paced):
    gateway, waits = paced
    headers = {"Authorization": f"Bearer {CONTROL_KEY}"}
    assert httpx.get(f"{gateway.url}/health", headers=headers, timeout=120).status_code == 200
    assert waits == []


def test_a_request_beyond_the_limit_of_open_ones_waits_too(paced, monkeypatch):
    def full(self, limit=MAX_REQUESTS):
        if limit == MAX_REQUESTS:
            raise ApiError(429, "many requests are open", code="rate_limit_exceeded")
        return contextlib.nullcontext()

    gateway, waits = paced
    monkeypatch.setattr(SessionShare, "request", full)
    assert httpx.get(f"{gateway.url}/v1/models", headers=gateway.headers(), timeout=120).status_code == 429
    assert len(waits) == 1


def test_a_trajectory_is_sent_to_a_limited_number_of_slow_clients(play, byte_model, connect):
    gateway = play(["ok"], model=byte_model.model_copy(update={"context_length": 1_000_000}))
    assert gateway.post({**CALL, "messages": [user("a" * 900_000)]}).status_code == 200
    path, form = "/v1/rollout/trajectory", {"Accept": "application/json"}
    assert len(gateway.post(b"", path=path, headers=form).content) > 6 * 2**20  # more than sockets hold
    held = []
    for _ in range(4):
        held.append(connection := connect(gateway))  # a silent one is closed after some seconds
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        begin(connection, gateway, path, 0)
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert gateway.seal().status_code == 429
    for connection in held:
        connection.close()
    until(lambda: gateway.seal().status_code == 200)


# --- calls ------------------------------------------------------------------------------------------------


def test_one_session_does_not_take_every_call_and_its_further_ones_wait(play, held, in_thread):
    limits = {"max_concurrent_calls": 8, "max_session_calls": 2}
    gateway = play(lambda prompt: held(prompt) if "hold" in prompt else "ok", gateway=limits, keepalive_s=0.05)
    with gateway.stream({**CALL, "messages": [user("hold")], "stream": True, "n": 2}, "busy") as _:
        waiting = in_thread(gateway.post, CALL, "busy")
        until(lambda: gateway.stats().calls_waiting == 1)
        assert gateway.post(CALL, "another").status_code == 200
        held.go.set()
        assert waiting.result(120).status_code == 200
    assert gateway.post({**CALL, "n": 5}, "third").status_code == 200
