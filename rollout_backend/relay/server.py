"""The relay: agents call it as they would call the gateway, and it passes their calls to the dialer.

    /v1/..., /s/SHARD/v1/...   agents; the answer is the gateway's own
    /relay                     the dialer's WebSocket
    /health                    whether the process lives, and which dialer is connected

Session keys are passed on and not looked at: the relay has no secret that could check them.

There is one dialer at a time. Another one with the right key replaces the first: it is a trainer that was started
again. The first is told so and must not come back, or the two would take the relay from each other for ever.

Answers that are the relay's own carry a body that the SDKs of both families can read:

    404  a path that does not pass                429  too many calls in flight
    413  the body is too large                    503  no dialer came within the wait, or another one took over
    431  headers too large or unprintable         504  the dialer did not come back, or the call took too long
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import WSCloseCode, web
from multidict import CIMultiDict

from rollout_backend.relay import handshake
from rollout_backend.relay.answers import error_body, error_headers
from rollout_backend.relay.channel import Channel, chunks
from rollout_backend.relay.exchange import CLOSE_TIMEOUT_S, CallLost, Close, Exchange, Link, LinkClosed
from rollout_backend.relay.frames import (
    MAX_FRAME,
    VERSION,
    Cancel,
    Challenge,
    Chunk,
    End,
    FrameError,
    Head,
    Headers,
    Hello,
    Open,
    Welcome,
    encode,
)
from rollout_backend.relay.routes import METHODS, passed, route
from rollout_backend.relay.settings import RelaySettings

log = logging.getLogger(__name__)

_HANDSHAKES = 32  # strangers at the door at once
_REMEMBERED = 64  # dialers that were replaced
_BACKLOG = 64 * 2**20  # bytes on their way to the dialer; above it no call begins
_KEEPALIVE_S = 4200.0  # longer than any balancer's, which would else use a connection that is being closed
_SHUTDOWN_S = 5.0


class _TurnedAway(Exception):
    """A dialer that may not stay."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Relay(Exchange):
    """The server's state: calls in flight, and the one dialer."""

    def __init__(self, settings: RelaySettings) -> None:
        super().__init__(settings.reconnect_s)
        self._settings = settings
        self._id = handshake.new_id()
        self._numbers = itertools.count(1)
        self._in_flight = 0
        self._at_the_door = 0
        self._dialer = ""  # whose calls are in flight, connected or not
        self._current: Link | None = None
        self._replaced: deque[str] = deque(maxlen=_REMEMBERED)
        self.app = web.Application(handler_args={"auto_decompress": False})  # a body is passed on as it came
        self.app.router.add_get("/health", self.health)
        self.app.router.add_get("/relay", self.dialer)
        self.app.router.add_route("*", "/{path:.*}", self.call)
        self.app.on_shutdown.append(self._shut_down)

    async def health(self, _: web.Request) -> web.StreamResponse:
        dialer = self._dialer if self.linked.is_set() else None
        return web.json_response({"status": "ok", "dialer": dialer, "calls": self._in_flight})

    # --- the dialer ---------------------------------------------------------------------------------------

    async def dialer(self, request: web.Request) -> web.StreamResponse:
        if self._at_the_door >= _HANDSHAKES:
            return _error(503, "too many dialers at once")
        socket = web.WebSocketResponse(
            heartbeat=self._settings.heartbeat_s, max_msg_size=MAX_FRAME, compress=False, timeout=CLOSE_TIMEOUT_S
        )
        link = Link(socket)
        self._at_the_door += 1
        try:
            await socket.prepare(request)
            dialer_id = await self._admit(link)
        except _TurnedAway as why:
            log.warning("a dialer was refused: %s", why)
            await link.close(why.code, str(why))
            return socket
        finally:
            self._at_the_door -= 1
        await self._serve(link, dialer_id)
        return socket

    async def _admit(self, link: Link) -> str:
        """The handshake: the dialer's id. Raises _TurnedAway."""
        challenge = Challenge(VERSION, self._id, handshake.new_nonce())
        key = self._settings.key.get_secret_value()
        try:
            async with asyncio.timeout(handshake.TIMEOUT_S):
                await link.say(challenge)
                said = await link.receive()
                if not isinstance(said, Hello):
                    raise FrameError(f"a {type(said).__name__} where a Hello should come")
                if said.version != VERSION:
                    raise _TurnedAway(Close.WRONG_VERSION, f"this relay speaks version {VERSION}")
                if not handshake.is_dialer(key, challenge, said):
                    raise _TurnedAway(Close.WRONG_KEY, "wrong key")
                if said.dialer_id in self._replaced:
                    raise _TurnedAway(Close.REPLACED, "another dialer has taken over")
                await link.say(Welcome(handshake.relay_proof(key, challenge, said)))
        except FrameError as error:
            raise _TurnedAway(Close.BROKEN_FRAME, str(error)) from None
        except (LinkClosed, TimeoutError):
            raise _TurnedAway(WSCloseCode.POLICY_VIOLATION, "no handshake") from None
        return said.dialer_id

    async def _serve(self, link: Link, dialer_id: str) -> None:
        if dialer_id != self._dialer:
            if self._dialer:
                log.warning("another dialer has taken over; the calls of the first one end")
                self._replaced.append(self._dialer)
            self.lose(CallLost(503, "another training side has taken over this relay"))
            self._dialer = dialer_id
            why: int = Close.REPLACED
        else:
            why = WSCloseCode.GOING_AWAY
        old, self._current = self._current, link
        closing = asyncio.create_task(old.close(why, "a newer connection")) if old is not None else None
        log.info("a dialer is connected")
        try:
            await self.serve(link)
        except LinkClosed as closed:
            log.info("the dialer's connection ended (code %s)", closed.code)
        except FrameError as error:
            log.error("the dialer does not speak the protocol: %s", error)  # noqa: TRY400  # the message is all
            await link.close(Close.BROKEN_FRAME, str(error))
        finally:
            if self._current is link:
                self._current = None
            if closing is not None:
                await asyncio.gather(closing, return_exceptions=True)

    def unknown_there(self, channel: Channel) -> None:
        if channel.untouched:  # it has not heard of it yet
            channel.resume(0)
        else:
            self.channels.pop(channel.call, None)
            channel.fail(CallLost(502, "the training side no longer knows this call"))

    # --- the agents ---------------------------------------------------------------------------------------

    async def call(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        if route(request.raw_path) is None or request.method not in METHODS:
            return _error(404, "the relay passes on calls of /v1/ and nothing else")
        try:
            headers = passed(request.headers.items())
        except ValueError as error:
            return _error(431, str(error))
        if (request.content_length or 0) > settings.max_body_bytes:
            return _error(413, f"the body is larger than {settings.max_body_bytes} bytes")
        if self._in_flight >= settings.max_calls:
            return _error(429, f"{settings.max_calls} calls are in flight")
        if self._link is not None and self._link.backlog > _BACKLOG:
            return _error(429, "the connection to the training side is congested")
        self._in_flight += 1
        answer: list[web.StreamResponse] = []
        try:
            async with asyncio.timeout(settings.call_s), self._dialed(request) as channel:
                await channel.send(partial(_open, request, headers))
                async with _pumping(request, channel, settings.max_body_bytes):
                    return await _answer(request, channel, answer)
        except CallLost as lost:
            failed = lost
        except TimeoutError:
            failed = CallLost(504, f"the call took longer than {settings.call_s:g} s")
        except ConnectionError:  # the agent hung up while it was answered
            return answer[0]
        finally:
            self._in_flight -= 1
        if not answer:
            return _error(failed.status, str(failed))
        log.warning("an answer that had begun was cut short: %s", failed)
        if request.transport is not None:  # without the end that a whole answer has
            request.transport.abort() if failed.status == 504 else request.transport.close()
        return answer[0]

    @contextlib.asynccontextmanager
    async def _dialed(self, request: web.Request) -> AsyncIterator[Channel]:
        """A new call, once there is a dialer; cancelled there if it is not over when it is left."""
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self.linked.wait()
        except TimeoutError:
            raise CallLost(503, "no training side is connected to this relay") from None
        channel = Channel(next(self._numbers), self.send)
        self.channels[channel.call] = channel
        whole = False
        try:
            yield channel
            whole = True
        finally:
            if self.channels.pop(channel.call, None) is not None and not whole:
                self.send(encode(Cancel(channel.call)))

    async def _shut_down(self, _: web.Application) -> None:
        self.lose(CallLost(503, "the relay is stopping"))
        if self._current is not None:
            await self._current.close(WSCloseCode.GOING_AWAY, "the relay is stopping")


def _open(request: web.Request, headers: Headers, call: int, seq: int) -> Open:
    return Open(call, seq, request.method, request.raw_path, headers, request.body_exists)


async def _answer(request: web.Request, channel: Channel, started: list[web.StreamResponse]) -> web.StreamResponse:
    """Streams the answer to the agent; `started` holds it as soon as anything was sent.

    Raises:
        CallLost: the answer does not come, or breaks off.
        ConnectionError: the agent hung up.
    """
    head = await channel.receive()
    if not isinstance(head, Head):
        raise CallLost(502, "the training side gave up the call")
    answer = web.StreamResponse(status=head.status, headers=CIMultiDict(head.headers))
    started.append(answer)
    await answer.prepare(request)
    channel.consumed()
    while isinstance(frame := await channel.receive(), Chunk):
        await answer.write(frame.data)  # returns when the agent has taken enough of it
        channel.consumed()
    if not isinstance(frame, End):
        raise CallLost(502, "the gateway broke off")
    await answer.write_eof()
    channel.consumed(now=True)
    return answer


@contextlib.asynccontextmanager
async def _pumping(request: web.Request, channel: Channel, cap: int) -> AsyncIterator[None]:
    """Sends the request's body while it is entered."""
    task = asyncio.create_task(_pump(request, channel, cap)) if request.body_exists else None
    try:
        yield
    finally:
        if task is not None:
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
                await channel.send(lambda call, seq, data=data: Chunk(call, seq, data))  # type: ignore[misc]
        await channel.send(End)
    except CallLost as lost:
        channel.fail(lost)
    except (web.RequestPayloadError, ConnectionError) as error:
        channel.fail(CallLost(400, f"the body cannot be read: {error}"))


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=error_body(status, message), headers=error_headers(status))


def run(settings: RelaySettings, tls: ssl.SSLContext | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    web.run_app(
        Relay(settings).app,
        host=settings.host,
        port=settings.port,
        ssl_context=tls,
        access_log=None,
        backlog=4096,
        handler_cancellation=True,  # an agent that hangs up ends its call
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_SHUTDOWN_S,
        print=None,
    )
