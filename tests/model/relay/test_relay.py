"""Calls through a relay process and a dialer to a test server."""

import asyncio
import gzip
import json

import aiohttp
import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer

from builders import eventually
from rollout_backend.model.relay.cli import KEY_ENV, serve
from rollout_backend.model.relay.exchange import WINDOW, Link
from rollout_backend.model.relay.relay_server import Relay
from rollout_backend.model.relay.relay_settings import RelaySettings


def sse(*texts: str) -> bytes:
    return b"".join(f"data: {text}\n\n".encode() for text in texts)


async def test_call_is_forwarded_unchanged(line, http):
    laid = await line()
    body = b"x" * 1_000_000
    headers = {"Authorization": "Bearer a-session-key", "X-Mine": "1", "Connection": "x-private", "X-Private": "1"}
    async with http.post(f"{laid.url}/v1/chat/completions?a=%20b", data=body, headers=headers) as answer:
        seen = await answer.json()
        assert (answer.status, answer.headers["X-Echo"]) == (200, "yes")
    assert (seen["path"], seen["method"], seen["bytes"]) == ("/v1/chat/completions?a=%20b", "POST", 1_000_000)
    assert seen["headers"]["Authorization"] == "Bearer a-session-key"
    assert seen["headers"]["Content-Length"] == "1000000"
    assert seen["headers"]["X-Mine"] == "1"
    assert seen["headers"]["Host"] == laid.upstream.url.removeprefix("http://")
    assert "X-Private" not in seen["headers"]
    assert await laid.relay.has_calls(0)
    assert laid.dialer.channels == {}


async def test_chunked_and_compressed_bodies_are_forwarded(line, http):
    laid = await line()

    async def parts():
        for _ in range(10):
            yield b"y" * 50_000

    async with http.post(f"{laid.url}/v1/x", data=parts()) as answer:
        assert (await answer.json())["bytes"] == 500_000
    packed = gzip.compress(b"z" * 10_000)

    async def raw(request: web.Request) -> web.Response:  # aiohttp has decompressed it, and keeps the header
        seen = json.dumps([request.headers["Content-Encoding"], len(await request.read())])
        return web.Response(body=gzip.compress(seen.encode()), headers={"Content-Encoding": "gzip"})

    laid.upstream.handle = raw
    async with http.post(f"{laid.url}/v1/x", data=packed, headers={"Content-Encoding": "gzip"}) as answer:
        assert json.loads(await answer.read()) == ["gzip", 10_000]
        assert answer.headers["Content-Encoding"] == "gzip"


async def test_stream_is_forwarded_without_delay(line, http, get):
    laid = await line()
    go = asyncio.Queue()

    async def stream(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while text := await go.get():
            await answer.write(sse(text))
        return answer

    laid.upstream.handle = stream
    go.put_nowait("one")
    async with http.post(f"{laid.url}/v1/x", json={}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert await answer.content.readline() == b"data: one\n"
        go.put_nowait("two")
        go.put_nowait("")
        assert await answer.content.read() == b"\n" + sse("two")


async def test_other_paths_are_refused(line):  # more paths: test_frames.py
    laid = await line()
    reader, writer = await asyncio.open_connection("127.0.0.1", laid.relay.port)
    writer.write(b"GET /v1/../control/stats HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert laid.upstream.asked == []


async def test_a_probe_is_answered_and_not_forwarded(line, http):
    laid = await line()
    for method in ("HEAD", "OPTIONS"):
        async with http.request(method, f"{laid.url}/") as answer:
            assert answer.status == 204
    assert laid.upstream.asked == []


async def test_path_names_the_shard(line, http, upstream, get):
    laid = await line(gateways={"0": "http://127.0.0.1:9", "1": upstream.url})
    async with http.get(f"{laid.url}/s/1/v1/models") as answer:
        assert (await answer.json())["path"] == "/v1/models"
    async with http.get(f"{laid.url}/s/2/v1/models") as answer:
        assert answer.status == 404
    async with http.get(f"{laid.url}/s/0/v1/models") as answer:  # no server listens there
        assert (answer.status, answer.headers["Retry-After"]) == (502, "1")
        error = (await answer.json())["error"]
        assert (error["type"], error["code"]) == ("api_error", "relay_502")


async def test_too_large_body_is_refused(line, host_relay, http):
    laid = await line(await host_relay(max_body_bytes=200_000))
    async with http.post(f"{laid.url}/v1/x", data=b"x" * 200_000) as answer:
        assert answer.status == 200
    async with http.post(f"{laid.url}/v1/x", data=b"x" * 200_001) as answer:
        assert answer.status == 413

    async def endless():
        for _ in range(40):
            yield b"x" * 10_000
            await asyncio.sleep(0)

    async with http.post(f"{laid.url}/v1/x", data=endless()) as answer:
        body = await answer.json()
        assert (answer.status, body["type"], body["error"]["type"]) == (413, "error", "request_too_large")
        assert "Retry-After" not in answer.headers
    await asyncio.sleep(0)
    assert await laid.relay.has_calls(0)


async def test_agent_disconnected_during_a_cut_ends_its_call_later(line, http):
    laid = await line()
    laid.upstream.hold()
    call = await laid.held_call(lambda url: http.post(url, json={}))
    await laid.cut()
    call.cancel()
    await eventually(lambda: laid.relay.has_calls(0))
    assert laid.upstream.left == 0
    laid.wire.down = False
    await eventually(lambda: laid.upstream.left == 1)


async def test_excess_calls_wait_until_others_end(line, host_relay, http, get):
    laid = await line(await host_relay(max_calls=1))
    go = laid.upstream.hold()
    calls = [await laid.held_call(get)]
    calls += [asyncio.create_task(get(f"{laid.url}/v1/x")) for _ in range(3)]
    await eventually(lambda: laid.relay.waits(3))
    go.set()
    assert [(await call).status for call in calls] == [200] * 4


async def test_signed_calls_of_one_trajectory_wait_in_one_turn(line, host_relay, http, get):
    """AWS's signature differs in each call of an agent for SageMaker's job runtime."""
    laid = await line(await host_relay(max_calls=1))
    go = laid.upstream.hold()

    async def sample(trajectory: str, path: str) -> None:
        headers = {"X-Amzn-SageMaker-Trajectory-Id": trajectory, "Authorization": f"AWS4-HMAC-SHA256 {path}"}
        async with http.get(f"{laid.url}/v1/{path}", headers=headers) as answer:
            await answer.read()

    calls = [await laid.held_call(get)]
    for number, (trajectory, path) in enumerate((("a", "a1"), ("a", "a2"), ("b", "b1")), 1):
        calls.append(asyncio.create_task(sample(trajectory, path)))
        await eventually(lambda number=number: laid.relay.waits(number))
    go.set()
    await asyncio.gather(*calls)
    assert laid.upstream.asked[-3:] == ["/v1/a1", "/v1/b1", "/v1/a2"]


async def test_calls_without_a_dialer_wait_and_get_503(host_relay, dial, upstream, http, get):
    relay = await host_relay(wait_s=0.3)
    async with http.get(f"{relay.url}/v1/models") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert "no training side" in (await answer.json())["error"]["message"]
    relay = await host_relay(wait_s=600)
    waiting = asyncio.create_task(get(f"{relay.url}/v1/models"))
    await eventually(lambda: relay.has_calls(1))
    dial(relay.url.replace("http", "ws"), upstream.url)
    assert (await waiting).status == 200


async def test_call_over_the_time_limit_ends(line, host_relay, http, get):
    laid = await line(await host_relay(call_s=0.5))
    laid.upstream.hold()
    async with http.get(f"{laid.url}/v1/x") as answer:
        assert answer.status == 504
    status = 504
    while status == 504:  # until the answer has begun within the limit
        try:
            status = (await get(f"{laid.url}/v1/stream")).status
        except aiohttp.ClientError:
            status = 0
    assert status == 0
    await eventually(lambda: laid.upstream.left == len(laid.upstream.asked))


async def test_incomplete_answer_is_not_taken_for_complete(line, http, get):
    laid = await line()

    async def broken(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(sse("one"))
        request.transport.close()
        return answer

    laid.upstream.handle = broken
    async with http.get(f"{laid.url}/v1/x") as answer:
        assert await answer.content.readexactly(len(sse("one"))) == sse("one")
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_error_before_the_body_was_read_is_forwarded(line, http):
    laid = await line()

    async def refuses(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=401)

    laid.upstream.handle = refuses
    reader, writer = await asyncio.open_connection("127.0.0.1", laid.relay.port)
    try:
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n" + b"x" * 8_000_000)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert await reader.readuntil(b"}}") == b'{"error": {"message": "no"}}'
    finally:
        writer.transport.abort()  # closing it would wait until the relay has read the body


# --- memory -----------------------------------------------------------------------------------------------


async def slow_reader(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and read only the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET /v1/flood HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def blocked(relay, sent_bytes) -> int:
    """Return the number of bytes sent, once it is the same before and after some other calls."""
    last = -1
    while last != (last := sent_bytes()):
        for _ in range(20):
            await relay.health()
    return last


async def test_slow_agent_delays_only_its_own_call(line, http, get):
    laid = await line()
    written = dict.fromkeys(range(20), 0)
    numbers = iter(written)
    size = 64 * 1024

    async def flood(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        if request.path != "/v1/flood":
            await answer.write(b"quick")
            return answer
        number = next(numbers)
        for _ in range(1600):  # 100 MiB
            await answer.write(b"x" * size)
            written[number] += size
        return answer

    laid.upstream.handle = flood
    readers = [await slow_reader(laid.relay.port) for _ in written]
    # Sockets hold some megabytes of each answer. What the relay keeps was sent, too.
    assert await blocked(laid.relay, lambda: sum(written.values())) < len(written) * 1600 * size / 2
    for channel in laid.dialer.channels.values():
        assert channel._kept_bytes <= WINDOW
    async with http.get(f"{laid.url}/v1/quick") as answer:
        assert await answer.read() == b"quick"
    reader, writer = readers[0]
    for _ in range(100):  # the other agents are not delayed
        await reader.readexactly(60_000)
    for _, writer in readers:
        writer.transport.abort()
    await eventually(lambda: not laid.dialer.channels)


async def test_slow_gateway_slows_down_the_agent(line, host_relay):
    laid = await line(await host_relay(max_body_bytes=10**9))
    go = asyncio.Event()

    async def waits(request: web.Request) -> web.Response:
        await go.wait()
        return web.json_response(len(await request.read()))

    laid.upstream.handle = waits
    reader, writer = await asyncio.open_connection("127.0.0.1", laid.relay.port)
    writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
    sent = 0

    async def send() -> None:
        nonlocal sent
        while sent < 50_000_000:
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000

    sending = asyncio.create_task(send())
    await eventually(lambda: bool(laid.upstream.asked))
    assert await blocked(laid.relay, lambda: sent) < 45_000_000
    (channel,) = laid.dialer.channels.values()
    assert channel._waiting_bytes <= WINDOW
    go.set()
    await sending
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await reader.readexactly(8) == b"50000000"
    writer.close()


async def test_cancelled_calls_on_a_blocked_connection_use_bounded_memory(key):
    class BlockedSocket:
        flowing = asyncio.Event()

        async def send_bytes(self, data: bytes) -> None:
            await self.flowing.wait()

    limit = 4 * WINDOW
    relay = Relay(RelaySettings(key=key), max_backlog_bytes=limit)
    link = relay._link = Link(BlockedSocket(), 15)
    link.on_written = relay._places.serve
    relay.linked.set()
    server = TestServer(relay.app, handler_cancellation=True)
    await server.start_server()

    async def cancelled_call() -> bool:
        """Return whether the call had to wait before any of it was sent."""
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n" + b"x" * 400_000)
        await eventually(
            lambda: relay._places.waiting or any(c._kept_bytes > WINDOW / 2 for c in relay.channels.values())
        )
        waits = bool(relay._places.waiting)
        writer.transport.abort()
        await eventually(lambda: not relay._places.held and not relay._places.waiting)
        return waits

    async with link.writing():
        assert [await cancelled_call() for _ in range(12)][-1]
        assert link.backlog <= limit + WINDOW + 1000
        BlockedSocket.flowing.set()
        await eventually(lambda: not link.backlog)
        assert not await cancelled_call()
    await server.close()


# --- the command line -------------------------------------------------------------------------------------


def test_relay_requires_a_key_and_both_tls_files(monkeypatch, key, tmp_path):
    monkeypatch.setenv(KEY_ENV, "short")
    with pytest.raises(typer.BadParameter, match="ROLLOUT__RELAY__KEY must hold the training"):
        serve()
    monkeypatch.setenv(KEY_ENV, key)
    with pytest.raises(typer.BadParameter, match="belong together"):
        serve(tls_key=tmp_path / "key.pem")
