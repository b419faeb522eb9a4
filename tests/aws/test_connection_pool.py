"""Connections against servers that answer in unkind ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from botocore.exceptions import EndpointConnectionError, HTTPClientError
from yarl import URL

from rollout_backend import aws
from rollout_backend.aws.connection_pool import ConnectionPool

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Play = Callable[[asyncio.StreamWriter, int], Awaitable[object]]


class Server:
    """Plays an answer to each request, which has the number of the request."""

    def __init__(self, play: Play, tls: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self._numbers = itertools.count()
        self._play = play
        self._tls = tls
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        scheme = "http" if self._tls is None else "https"
        self.origin = URL(f"{scheme}://localhost:{self._server.sockets[0].getsockname()[1]}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await self._play(writer, next(self._numbers))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()


def says(*pieces: bytes, close: bool = False) -> Play:
    """Answer each request with these pieces, one after the other."""

    async def play(writer: asyncio.StreamWriter, number: int) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return play


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[tuple[Server, ConnectionPool]]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            play: Play, *, served: ssl.SSLContext | None = None, trusted: ssl.SSLContext | None = None, **options: Any
        ) -> tuple[Server, ConnectionPool]:
            server = await stack.enter_async_context(Server(play, served))
            limits = {"limit": 4, "connect_timeout_s": 120.0, "read_timeout_s": 120.0, "keepalive_s": 600.0}
            pool = ConnectionPool(server.origin, trusted, **{**limits, **options})
            stack.push_async_callback(pool.aclose)
            return server, pool

        yield start


async def get(pool: ConnectionPool, *, idempotent: bool = True) -> tuple[int, bytes]:
    async with await pool.send(GET, idempotent=idempotent) as response:
        return response.status, await response.read()


async def test_a_connection_is_kept(serve):
    server, pool = await serve(says(OK))
    assert [await get(pool) for _ in range(3)] == [(200, b"ok")] * 3
    assert server.connections == 1


ANSWERS = {
    "length": ([OK], b"ok"),
    "byte by byte": ([OK[i : i + 1] for i in range(len(OK))], b"ok"),
    "chunked": ([CHUNKED + b"1;x=y\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"], b"ok"),
    "trailers": ([CHUNKED + b"2\r\nok\r\n0\r\nLink: z\r\n", b"X: y\r\n\r\n"], b"ok"),
    "empty": ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], b""),
    "interim": ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\n", OK], b"ok"),
}


@pytest.mark.parametrize(("pieces", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_a_whole_response_leaves_a_connection_to_use_again(serve, pieces, body):
    server, pool = await serve(says(*pieces))
    for _ in range(3):
        async with await pool.send(GET, idempotent=False) as response:
            assert (response.status, await response.read()) == (200, body)
            assert not {"x", "link"} & {name.lower() for name in response.headers}
    assert server.connections == 1


async def test_a_body_that_fills_the_read_ahead_leaves_a_connection_to_use_again(serve):
    body = b"x" * (1024 * 1024)
    server, pool = await serve(says(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n", body))
    for _ in range(2):
        async with asyncio.timeout(60), await pool.send(GET, idempotent=False) as response:
            while not response._complete:  # noqa: ASYNC110  # the whole body arrives before it is read
                await asyncio.sleep(0)
            assert await response.read() == body
    assert server.connections == 1


LAST_ANSWERS = {
    "closed": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "two answers": OK + OK.replace(b"ok", b"no"),
    "an answer and garbage": OK + b"garbage",
}


@pytest.mark.parametrize("answer", LAST_ANSWERS.values(), ids=LAST_ANSWERS)
async def test_a_connection_that_cannot_be_trusted_is_not_used_again(serve, answer):
    server, pool = await serve(says(answer))
    assert [await get(pool) for _ in range(3)] == [(200, b"ok")] * 3
    assert server.connections == 3


async def test_a_body_without_a_length_ends_with_the_connection(serve):
    server, pool = await serve(says(b"HTTP/1.1 200 OK\r\n\r\n", b"ok", close=True))
    assert [await get(pool) for _ in range(2)] == [(200, b"ok")] * 2
    assert server.connections == 2


CUT_BODIES = (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", CHUNKED + b"2\r\nok\r\n", CHUNKED + b"9\r\nok")


@pytest.mark.parametrize("answer", CUT_BODIES)
async def test_a_truncated_body_is_an_error(serve, answer):
    _, pool = await serve(says(answer, close=True))
    with pytest.raises(aiohttp.ClientPayloadError, match="before the end of the body"):
        await get(pool)


MALFORMED = (
    b"garbage\r\n\r\n",
    b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    CHUNKED + b"zz\r\nok\r\n0\r\n\r\n",
    CHUNKED + b"2\r\nok0\r\n\r\n",
)


@pytest.mark.parametrize("answer", MALFORMED)
async def test_a_malformed_response_is_an_error(serve, answer):
    server, pool = await serve(says(answer), limit=1)
    for _ in range(2):
        with pytest.raises(aiohttp.ClientPayloadError, match="malformed"):
            await get(pool)
    assert server.connections == 2


async def test_endless_headers_are_an_error(serve):
    async def play(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X: %b\r\n" % (b"y" * 1000))
            await writer.drain()

    _, pool = await serve(play)
    with pytest.raises(aiohttp.ClientPayloadError, match="headers exceed 65536 bytes"):
        await get(pool)


# --- connections that break -------------------------------------------------------------------------------


async def closes_the_second(writer: asyncio.StreamWriter, number: int) -> None:
    if number == 1:
        writer.transport.abort()
    else:
        writer.write(OK)


async def test_an_idempotent_request_on_a_stale_connection_is_sent_again(serve):
    server, pool = await serve(closes_the_second, limit=1)
    assert [await get(pool) for _ in range(3)] == [(200, b"ok")] * 3
    assert server.connections == 2


async def test_another_request_on_a_stale_connection_is_not(serve):
    _, pool = await serve(closes_the_second, limit=1)
    await get(pool)
    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)) as caught:
        await get(pool, idempotent=False)
    assert not isinstance(caught.value, aws.NO_CONNECTION), "the server may have received it"
    assert await get(pool, idempotent=False) == (200, b"ok")


async def test_a_request_on_a_new_connection_is_sent_once(serve):
    server, pool = await serve(says(b"HTTP/1.1 200 OK\r\n", close=True))
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await get(pool)
    assert server.connections == 1


async def test_an_old_connection_is_replaced(serve):
    server, pool = await serve(says(OK), keepalive_s=-1.0)
    assert [await get(pool) for _ in range(2)] == [(200, b"ok")] * 2
    assert server.connections == 2


async def test_a_connection_with_an_unfinished_request_is_not_used_again(serve):
    async def play(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(OK)
        if number == 0:
            await asyncio.Event().wait()  # reads no further

    server, pool = await serve(play)
    async with await pool.send(GET + b"x" * 20_000_000, idempotent=False) as response:
        assert await response.read() == b"ok"
    assert await get(pool) == (200, b"ok")
    assert server.connections == 2


# --- time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED, CHUNKED + b"2\r\nok\r\n"])
async def test_a_response_that_stops_is_an_error(serve, begin):
    _, pool = await serve(says(begin), read_timeout_s=0.1, limit=1)
    for _ in range(2):
        with pytest.raises(aiohttp.SocketTimeoutError):
            await get(pool)


@pytest.fixture
async def pass_time(monkeypatch) -> Callable[[float], Awaitable[None]]:
    """Let the event loop's clock go forward."""
    loop = asyncio.get_running_loop()
    clock, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: clock() + passed)

    async def pass_time(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        for _ in range(3):  # passes of the loop, in which timers expire
            await asyncio.sleep(0)

    return pass_time


async def test_an_idle_connection_needs_no_bytes(serve, pass_time):
    server, pool = await serve(says(OK), read_timeout_s=30.0)
    await get(pool)
    await pass_time(50.0)
    assert await get(pool) == (200, b"ok")
    assert server.connections == 1


async def test_a_body_can_be_read_with_long_pauses(serve, pass_time):
    """A body that is not read is held back: the server is not at fault."""
    body = b"x" * 8_000_000
    _, pool = await serve(says(b"HTTP/1.1 200 OK\r\nContent-Length: 8000000\r\n\r\n", body), read_timeout_s=30.0)
    async with await pool.send(GET, idempotent=True) as response:
        while not response._connection._paused:  # noqa: ASYNC110  # it sets no event
            await asyncio.sleep(0)
        await pass_time(50.0)
        assert await response.read() == body


async def test_a_handshake_that_stops_is_an_error(serve):
    _, pool = await serve(says(OK), trusted=ssl.create_default_context(), connect_timeout_s=0.1, limit=1)
    for _ in range(2):
        with pytest.raises(aws.NO_CONNECTION) as caught:
            await get(pool)
        assert not aws.was_sent(caught.value)


# --- readers that leave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n", CHUNKED, CHUNKED + b"2\r\nno\r\n"])
async def test_the_connection_of_a_cancelled_call_is_not_used_again(serve, begin):
    begun = asyncio.Event()

    async def play(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(begin if number == 0 else OK)
        await writer.drain()
        begun.set()

    server, pool = await serve(play, limit=1)
    call = asyncio.create_task(get(pool))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await get(pool) == (200, b"ok")
    assert server.connections == 2


async def test_a_call_that_is_cancelled_after_its_response_leaves_the_next_alone(serve):
    """Both happen in one pass of the event loop: the connection may carry the next call by then."""
    server, pool = await serve(says(OK), limit=1)
    await get(pool)
    first, second = asyncio.create_task(get(pool)), asyncio.create_task(get(pool))
    connection = next(iter(pool._open))
    received = connection.data_received

    def receive_and_cancel(data: bytes) -> None:
        received(data)
        first.cancel()

    connection.data_received = receive_and_cancel
    assert await second == (200, b"ok")
    with pytest.raises(asyncio.CancelledError):
        await first
    assert server.connections == 1


async def test_a_large_body_is_read_at_the_readers_pace(serve):
    written = 0

    async def play(writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal written
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n%b\r\n" % (b"x" * 65536))
            await writer.drain()
            written += 65536

    server, pool = await serve(play, limit=1)
    for _ in range(2):
        async with await pool.send(GET, idempotent=True) as response:
            assert await aws.read_up_to(response, 3_000_000) == b"x" * 3_000_000
    assert server.connections == 2
    assert written < 64_000_000


async def test_calls_wait_for_a_connection(serve):
    server, pool = await serve(says(OK), limit=2)
    assert await asyncio.gather(*(get(pool) for _ in range(20))) == [(200, b"ok")] * 20
    assert server.connections == 2


# --- opening and closing ----------------------------------------------------------------------------------


async def test_tls_is_verified(serve, authority):
    served, trusted = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(served)
    _, stranger = await serve(says(OK), served=served, trusted=ssl.create_default_context())
    with pytest.raises(EndpointConnectionError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        await get(stranger)
    assert not aws.was_sent(caught.value)
    authority.configure_trust(trusted)
    server, pool = await serve(says(CHUNKED, b"2\r\nok\r\n", b"0\r\n\r\n"), served=served, trusted=trusted)
    assert [await get(pool) for _ in range(2)] == [(200, b"ok")] * 2
    assert server.connections == 1


async def test_a_refused_connection_was_not_sent(serve):
    server, pool = await serve(says(OK), limit=1)
    await server.stop()
    for _ in range(2):
        with pytest.raises(EndpointConnectionError) as caught:
            await get(pool)
        assert isinstance(caught.value, aws.NO_CONNECTION)
        assert not aws.was_sent(caught.value)


async def test_a_closed_pool_ends_its_calls_and_opens_no_connection(serve):
    begun = asyncio.Event()

    async def play(writer: asyncio.StreamWriter, number: int) -> None:
        begun.set()

    server, pool = await serve(play)
    call = asyncio.create_task(get(pool, idempotent=False))
    await begun.wait()
    await pool.aclose()
    with pytest.raises(aiohttp.ClientConnectionError):
        await call
    with pytest.raises(HTTPClientError, match="the client is closed"):
        await get(pool)
    assert server.connections == 1
