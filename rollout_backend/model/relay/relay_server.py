"""The relay's server. Agents call it like the gateway, and it forwards their calls to the dialer.

    /v1/..., /s/SHARD/v1/...   agents; the answer is the gateway's
    /relay                     the dialer's WebSocket
    /health                    whether the process is alive, and which dialer is connected

Session keys are forwarded unchecked, because the relay has no secret to verify them with.

At most one dialer is connected. A new dialer with the right key replaces it, because it belongs to a restarted
trainer. The replaced one is refused afterwards; otherwise the two would replace each other endlessly.

The OpenAI and Anthropic SDKs can parse the bodies of the relay's own errors:

    404  the path is not allowed                  429  too many calls in flight
    413  the body is too large                    503  no dialer connected in time, or another one took over
    431  headers too large or unprintable         504  the dialer did not reconnect, or the call took too long
"""

import asyncio
import contextlib
import itertools
import logging
import signal
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from aiohttp import StreamReader, WSCloseCode, web
from multidict import CIMultiDict

from rollout_backend.base.addresses import listen_addresses
from rollout_backend.base.fair_queue import FairQueue
from rollout_backend.base.logs import report_failure
from rollout_backend.base.waiting_connections import (
    MAX_CONNECTIONS,
    WaitingConnections,
    WatchedProtocol,
    raise_file_limit,
)
from rollout_backend.model.relay.exchange import (
    CLOSE_TIMEOUT_S,
    CallLost,
    Channel,
    Close,
    Exchange,
    Link,
    LinkClosed,
    chunks,
)
from rollout_backend.model.relay.forwarding import METHODS, error_body, error_headers, forwarded_headers, route
from rollout_backend.model.relay.protocol import (
    HANDSHAKE_S,
    MAX_FRAME,
    VERSION,
    Cancel,
    Challenge,
    Chunk,
    End,
    FrameError,
    Head,
    Hello,
    Open,
    encode,
    make_welcome,
    new_id,
    new_nonce,
    verify_dialer,
)
from rollout_backend.model.relay.relay_settings import RelaySettings

log = logging.getLogger(__name__)

# Limit on concurrent handshakes. A further one ends the oldest.
_HANDSHAKES = 512
# A limit in bytes: msgpack allocates what nested arrays claim to hold, up to 1000 times their size.
_MAX_HELLO = 1024
_REMEMBERED = 64
# New calls wait while more bytes than this are queued for the dialer.
_BACKLOG = 64 * 2**20
# No load balancer keeps a connection longer, so none reuses a connection that the relay is closing.
_KEEPALIVE_S = 4200.0
_SHUTDOWN_S = 5.0
_OTHER_FILES = 64


class _DialerRefused(Exception):
    """The dialer was not admitted."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Relay(Exchange):
    """The server's state: the calls in flight and the dialer."""

    def __init__(self, settings: RelaySettings, max_backlog_bytes: int = _BACKLOG) -> None:
        super().__init__(settings.reconnect_s)
        self._settings = settings
        self._max_backlog_bytes = max_backlog_bytes
        self._id = new_id()
        self._numbers = itertools.count(1)
        self._places = FairQueue(max(1, settings.max_calls // 4), self._has_room)
        # Oldest first.
        self._handshakes: list[asyncio.Task[object]] = []
        # Id of the dialer whose calls are in flight, even while it is disconnected.
        self._dialer = ""
        self._current: Link | None = None
        self._replaced: deque[str] = deque(maxlen=_REMEMBERED)
        self.app = web.Application()
        self.app.router.add_get("/health", self.health)
        self.app.router.add_get("/relay", self.dialer)
        self.app.router.add_route("*", "/{path:.*}", self.call)
        self.app.on_shutdown.append(self._shut_down)

    async def health(self, _: web.Request) -> web.StreamResponse:
        dialer = self._dialer if self.linked.is_set() else None
        return web.json_response(
            {"status": "ok", "dialer": dialer, "calls": self._places.held, "waiting": self._places.waiting}
        )

    # --- the dialer ---------------------------------------------------------------------------------------

    async def dialer(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=self._settings.heartbeat_s, max_msg_size=MAX_FRAME, compress=False, timeout=CLOSE_TIMEOUT_S
        )
        link = Link(socket, self._settings.heartbeat_s)
        handshake_task = asyncio.current_task()
        assert handshake_task is not None
        if len(self._handshakes) >= _HANDSHAKES:
            # Refusing them would let strangers, who hold theirs until the timeout, lock out the dialer.
            self._handshakes.pop(0).cancel()
        self._handshakes.append(handshake_task)
        try:
            await socket.prepare(request)
            dialer_id = await self._admit(link)
        except _DialerRefused as why:
            log.warning("a dialer was refused: %s", why)
            await link.close(why.code, str(why))
            return socket
        finally:
            if handshake_task in self._handshakes:
                self._handshakes.remove(handshake_task)
        link.on_written = self._places.serve
        await self._serve(link, dialer_id)
        return socket

    async def _admit(self, link: Link) -> str:
        """Perform the handshake and return the dialer's id. Raises _DialerRefused."""
        challenge = Challenge(VERSION, self._id, new_nonce())
        key = self._settings.key.get_secret_value()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await link.send_now(challenge)
                hello = await link.receive(_MAX_HELLO)
                if not isinstance(hello, Hello):
                    raise FrameError(f"a {type(hello).__name__} instead of a Hello")
                if hello.version != VERSION:
                    raise _DialerRefused(Close.WRONG_VERSION, f"this relay speaks version {VERSION}")
                if not verify_dialer(key, challenge, hello):
                    raise _DialerRefused(Close.WRONG_KEY, "wrong key")
                if hello.dialer_id in self._replaced:
                    raise _DialerRefused(Close.REPLACED, "another dialer has taken over")
                await link.send_now(make_welcome(key, challenge, hello))
        except FrameError as error:
            raise _DialerRefused(Close.BROKEN_FRAME, str(error)) from None
        except (LinkClosed, TimeoutError):
            raise _DialerRefused(WSCloseCode.POLICY_VIOLATION, "no handshake") from None
        return hello.dialer_id

    async def _serve(self, link: Link, dialer_id: str) -> None:
        if dialer_id != self._dialer:
            if self._dialer:
                log.warning(
                    "a new dialer is connected: it was restarted, or another training side uses this relay. Calls in "
                    "flight end"
                )
                self._replaced.append(self._dialer)
            self.fail_calls(CallLost(503, "a new dialer is connected to this relay: repeat the call"))
            self._dialer = dialer_id
            why: int = Close.REPLACED
        else:
            why = WSCloseCode.GOING_AWAY
        old, self._current = self._current, link
        closing: asyncio.Task[None] | None = None
        if old is not None:
            closing = asyncio.create_task(old.close(why, "a newer connection"))
            closing.add_done_callback(report_failure("closing an earlier connection"))
        log.info("a dialer is connected")
        try:
            await self.serve(link)
        except LinkClosed as closed:
            log.info("the dialer's connection ended (code %s)", closed.code)
        except FrameError as error:
            log.error("the dialer does not speak the protocol: %s", error)  # noqa: TRY400
            await link.close(Close.BROKEN_FRAME, str(error))
        finally:
            if self._current is link:
                self._current = None
            if closing is not None:
                await asyncio.gather(closing, return_exceptions=True)

    def on_unknown_call(self, channel: Channel) -> None:
        if channel.is_unprocessed:
            # The other side has not received the call yet.
            channel.resume(0)
        else:
            self.channels.pop(channel.call, None)
            channel.fail(CallLost(502, "the training side no longer knows this call"))

    # --- the agents ---------------------------------------------------------------------------------------

    async def call(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        # Clients probe their base URL.
        if request.method in ("HEAD", "OPTIONS"):
            return web.Response(status=204)
        if route(request.raw_path) is None or request.method not in METHODS:
            return _error(404, "the relay forwards only calls of /v1/")
        try:
            headers = forwarded_headers(request.headers.items())
        except ValueError as error:
            return _error(431, str(error))
        if (request.content_length or 0) > settings.max_body_bytes:
            return _error(413, f"the body is larger than {settings.max_body_bytes} bytes")
        answer: list[web.StreamResponse] = []
        try:
            async with asyncio.timeout(settings.call_s), self._place(request), self._dialed() as channel:
                await channel.send(Open, request.method, request.raw_path, headers, request.body_exists)
                async with _pumping(request, channel, settings.max_body_bytes):
                    return await _answer(request, channel, answer)
        except CallLost as lost:
            failed = lost
        except TimeoutError:
            failed = CallLost(504, f"the call took longer than {settings.call_s:g} s")
        except ConnectionError:
            # The agent disconnected while it received the answer.
            return answer[0]
        if not answer:
            return _error(failed.status, str(failed))
        log.warning("an answer was cut off: %s", failed)
        # Otherwise the agent would see the end of a complete answer.
        if request.transport is not None:
            request.transport.abort() if failed.status == 504 else request.transport.close()
        return answer[0]

    @contextlib.asynccontextmanager
    async def _place(self, request: web.Request) -> AsyncIterator[None]:
        """Wait, with an unread body, until another call may be in flight. Callers with different keys take turns."""
        key = (
            # AWS's signature, in the header Authorization, differs in each call.
            request.headers.get("X-Amzn-SageMaker-Trajectory-Id")
            or request.headers.get("Authorization")
            or request.headers.get("X-Api-Key")
            or request.path.partition("/v1")[0]
        )
        async with self._places.place(hash(key)):
            yield

    def _has_room(self) -> bool:
        congested = self._link is not None and self._link.backlog > self._max_backlog_bytes
        return self._places.held < self._settings.max_calls and not congested

    @contextlib.asynccontextmanager
    async def _dialed(self) -> AsyncIterator[Channel]:
        """Open a call once a dialer is connected. On exit, cancel the call unless it is complete."""
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self.linked.wait()
        except TimeoutError:
            raise CallLost(503, "no training side is connected to this relay") from None
        channel = Channel(next(self._numbers), self.send)
        self.channels[channel.call] = channel
        complete = False
        try:
            yield channel
            complete = True
        finally:
            if self.channels.pop(channel.call, None) is not None and not complete:
                self.send(encode(Cancel(channel.call)))

    async def _shut_down(self, _: web.Application) -> None:
        self.fail_calls(CallLost(503, "the relay is stopping"))
        if self._current is not None:
            await self._current.close(WSCloseCode.GOING_AWAY, "the relay is stopping")


async def _answer(request: web.Request, channel: Channel, started: list[web.StreamResponse]) -> web.StreamResponse:
    """Stream the answer to the agent, and append it to `started` once its first byte was sent.

    Raises:
        CallLost: the answer is missing or incomplete.
        ConnectionError: the agent disconnected.
    """
    head = await channel.receive()
    if not isinstance(head, Head):
        raise CallLost(502, "the training side gave up the call")
    answer = web.StreamResponse(status=head.status, headers=CIMultiDict(head.headers))
    started.append(answer)
    await answer.prepare(request)
    channel.mark_processed()
    while isinstance(frame := await channel.receive(), Chunk):
        # This waits while the agent reads slowly.
        await answer.write(frame.data)
        channel.mark_processed()
    if not isinstance(frame, End):
        raise CallLost(502, "the gateway's answer is incomplete")
    await answer.write_eof()
    channel.mark_processed(now=True)
    return answer


@contextlib.asynccontextmanager
async def _pumping(request: web.Request, channel: Channel, cap: int) -> AsyncIterator[None]:
    """Send the request's body in the background."""
    if not request.body_exists:
        yield
        return
    task = asyncio.create_task(_pump(request, channel, cap))
    task.add_done_callback(report_failure("reading a request's body"))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _pump(request: web.Request, channel: Channel, cap: int) -> None:
    size = 0
    try:
        async for read in request.content.iter_any():
            size += len(read)
            if size > cap:
                raise CallLost(413, f"the body is larger than {cap} bytes")
            for data in chunks(read):
                await channel.send(Chunk, data)
        await channel.send(End)
    except CallLost as lost:
        channel.fail(lost)
    except (web.RequestPayloadError, ConnectionError) as error:
        channel.fail(CallLost(400, f"the body cannot be read: {error}"))
    except Exception:
        channel.fail(CallLost(502, "the relay failed while it read the body"))
        raise


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=error_body(status, message), headers=error_headers(status))


class _Connection(WatchedProtocol, web.RequestHandler):
    """A connection that reports the start and the end of its requests to `waiting`."""

    def __init__(self, server: web.Server, waiting: WaitingConnections, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.waiting = waiting
        self._last_body: StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        # aiohttp calls this without data too, and ends bodies that outlast their answer.
        if data and (self._last_body is None or self._last_body.is_eof()):
            self.waiting.received(self.connection)
        super().data_received(data)

    @contextlib.contextmanager
    def request(self, body: StreamReader) -> Iterator[None]:
        self.waiting.request_began(self.connection)
        try:
            yield
        finally:
            self._last_body = body
            self.waiting.request_ended(self.connection)


@contextlib.asynccontextmanager
async def serving(
    settings: RelaySettings, tls: ssl.SSLContext | None = None, max_connections: int | None = None, **limits: float
) -> AsyncIterator[int]:
    """Serve a relay and yield its port. The default of `max_connections` depends on this process's open files;
    `limits` are passed to `WaitingConnections`."""
    if max_connections is None:
        # Calls that wait for their turn have connections, too.
        files = raise_file_limit(MAX_CONNECTIONS + _OTHER_FILES) - _OTHER_FILES
        max_connections = max(16, min(files, MAX_CONNECTIONS))
    runner = web.AppRunner(
        Relay(settings).app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    assert runner.server is not None
    handle = runner.server.request_handler

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, _Connection)
        with request.protocol.request(request.content):
            return await handle(request)

    runner.server.request_handler = handled
    connection = partial(
        _Connection,
        runner.server,
        WaitingConnections(max_connections, **limits),
        access_log=None,
        # Bodies are forwarded unchanged.
        auto_decompress=False,
        keepalive_timeout=_KEEPALIVE_S,
    )
    try:
        server = await asyncio.get_running_loop().create_server(
            connection, listen_addresses(settings.host), settings.port, ssl=tls, backlog=4096
        )
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


def run(settings: RelaySettings, tls: ssl.SSLContext | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C."""

    async def serve() -> None:
        stopped = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, stopped.set)
        async with serving(settings, tls):
            await stopped.wait()

    asyncio.run(serve())
