"""A relay in a separate process, a dialer, a server behind it, and a connection between them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from builders import eventually, served
from relays import KEY, RelayProcess, RelayServer, relay_process
from rollout_backend.model.relay.dialer import Dialer
from rollout_backend.model.relay.relay_server import serving
from rollout_backend.model.relay.relay_settings import DialerSettings, RelaySettings


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture(scope="session")
def shared_relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay with default settings. Each test's dialer takes over from the previous one."""
    relay = relay_process(tmp_path_factory.mktemp("relay") / "relay.log")
    with start_blocking_portal() as portal:
        portal.call(relay.start)
        yield relay
        portal.call(relay.process.stop)


@pytest.fixture
async def start_relay(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[RelayProcess]]]:
    """Start `python -m rollout_backend.model.relay`; further arguments are its options."""
    async with AsyncExitStack() as stack:

        async def start(*options: object) -> RelayProcess:
            relay = relay_process(tmp_path / "relay.log", *options)
            stack.push_async_callback(relay.process.stop)
            await relay.start()
            return relay

        yield start


@pytest.fixture
async def host_relay() -> AsyncIterator[Callable[..., Awaitable[RelayServer]]]:
    """Serve a relay with these settings in this process, where its process is not the subject."""
    async with AsyncExitStack() as stack:

        async def host(max_connections: int | None = None, **settings: Any) -> RelayServer:
            limits = {name: settings.pop(name, 60) for name in ("head_s", "read_s")}
            given = RelaySettings(**{"key": KEY, "port": 0, **settings})
            served = serving(given, max_connections=max_connections, **limits)
            return RelayServer(await stack.enter_async_context(served))

        yield host


class Wire:
    """A TCP proxy to `port` that can be cut, blocked, and restored."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.connections = 0  # connections so far
        self.down = False
        self.half = False  # the end of a connection on one side does not reach the other
        self.cut_every = 0  # cut after this many bytes; 0: never
        self._passed = 0
        self._to = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.cut()
        for writer in self._left:
            writer.transport.abort()

    async def cut(self) -> None:
        """End every connection at once, and lose the bytes in transit."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """Drop all bytes without closing a connection."""
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        writers = [writer]
        try:
            if self.down:
                return
            self.connections += 1
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            writers.append(back)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back))
                group.create_task(self._pump(there, writer))
        except* (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            if self.half:
                self._left += writers[1:]
            else:
                for one in writers:
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
            self._passed += len(data)
            if self.cut_every and self._passed >= self.cut_every:
                self._passed = 0
                break
        raise ConnectionResetError


@pytest.fixture
async def wire() -> AsyncIterator[Callable[[int], Awaitable[Wire]]]:
    async with AsyncExitStack() as stack:

        async def lay(port: int) -> Wire:
            return await stack.enter_async_context(Wire(port))

        yield lay


@dataclass
class Upstream:
    """A server in place of the gateway. `handle` answers; by default it returns the request."""

    url: str = ""
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    asked: list[str] = field(default_factory=list)
    left: int = 0  # calls whose client disconnected

    def hold(self, text: str = "at last") -> asyncio.Event:
        """Answer requests once the returned event is set. A stream begins before."""
        go = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/v1/stream":
                stream = web.StreamResponse()
                await stream.prepare(request)
                await stream.write(b"data: one\n\n")
            await go.wait()
            return web.Response(text=text)

        self.handle = answer
        return go

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.raw_path)
        try:
            return await (self.handle or _echo)(request)
        except asyncio.CancelledError:
            self.left += 1
            raise


async def _echo(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    seen = {"path": request.raw_path, "method": request.method, "headers": dict(request.headers), "bytes": len(body)}
    return web.json_response(seen, headers={"X-Echo": "yes"})


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = Upstream()
    async with served(server.serve, handler_cancellation=True, shutdown_timeout=0.1) as server.url:
        yield server


@pytest.fixture
async def dial() -> AsyncIterator[Callable[..., tuple[Dialer, asyncio.Task[None]]]]:
    """Start a dialer in this process. The test checks one that ends."""
    tasks: list[asyncio.Task[None]] = []

    def start(url: str, gateway: str, **settings: Any) -> tuple[Dialer, asyncio.Task[None]]:
        given = {"key": KEY, "gateways": {"": gateway, "0": gateway}, **settings}
        dialer = Dialer(DialerSettings(url=url, **given))
        tasks.append(asyncio.create_task(dialer.run()))
        return dialer, tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@pytest.fixture
def get(http: aiohttp.ClientSession) -> Callable[[str], Awaitable[aiohttp.ClientResponse]]:
    """Send a request and read the whole answer."""

    async def ask(url: str) -> aiohttp.ClientResponse:
        async with http.get(url) as answer:
            await answer.read()
            return answer

    return ask


@dataclass
class Line:
    """The whole chain: the agents' `url`, the dialer's connection, and the server behind."""

    relay: RelayServer
    wire: Wire
    upstream: Upstream
    dialer: Dialer
    dialling: asyncio.Task[None]

    @property
    def url(self) -> str:
        return self.relay.url

    async def held_call(self, get: Callable[[str], Awaitable[Any]], path: str = "/v1/x") -> asyncio.Task[Any]:
        """Call the server behind, which has got the call when this returns."""
        before = len(self.upstream.asked)
        call = asyncio.create_task(get(self.url + path))
        await eventually(lambda: len(self.upstream.asked) > before)
        return call

    async def cut(self) -> None:
        """Cut the dialer's connection, until `wire.down` is reset."""
        self.wire.down = True
        await self.wire.cut()


@pytest.fixture
async def line(
    shared_relay: RelayServer,
    wire: Callable[[int], Awaitable[Wire]],
    upstream: Upstream,
    dial: Callable[..., tuple[Dialer, asyncio.Task[None]]],
) -> Callable[..., Awaitable[Line]]:
    async def lay(relay: RelayServer = shared_relay, **settings: Any) -> Line:
        laid = await wire(relay.port)
        dialer, task = dial(laid.url, upstream.url, **settings)

        async def dialled() -> bool:
            return task.done() or await relay.dialled(dialer._settings.dialer_id)

        await eventually(dialled)
        if task.done():
            await task
        return Line(relay, laid, upstream, dialer, task)

    return lay
