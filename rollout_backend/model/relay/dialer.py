"""Keep a WebSocket to the relay open, and make the relay's calls at the gateway.

    python -m rollout_backend.model.relay.dialer < settings.json

The dialer reconnects with back-off and jitter, and exits only if the relay says that reconnecting is useless: the
keys or versions differ, or another dialer has taken over.

It trusts the relay only with the traffic itself. The dialer checks which calls are allowed (`forwarding`), so a
compromised relay cannot reach a control path or another server.
"""

import asyncio
import logging
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
from multidict import CIMultiDict
from tenacity import wait_random_exponential
from yarl import URL

from rollout_backend.base.logs import configure_logs, report_failure
from rollout_backend.base.retry import log_retry, retry
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
    Abort,
    Challenge,
    Chunk,
    End,
    FrameError,
    Head,
    Open,
    Welcome,
    make_hello,
    verify_relay,
)
from rollout_backend.model.relay.relay_settings import REFUSED, DialerSettings

log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_BACKOFF = wait_random_exponential(multiplier=0.25, max=10.0)
# The gateway's timeout is longer, so the gateway closes no connection in use.
_GATEWAY_KEEPALIVE_S = 2.0
_REFUSALS = {
    Close.WRONG_KEY: "the relay refuses our key: relay.key here and ROLLOUT__RELAY__KEY there must be the same",
    Close.REPLACED: "another training side with the same key has taken over the relay: give each its own relay",
    Close.WRONG_VERSION: f"the relay does not speak protocol {VERSION}: install one release on both sides",
}


class RelayRefused(Exception):
    """Reconnecting is useless. The message says what to do."""


class _NoLink(Exception):
    """This attempt failed; the next one may succeed."""


class Dialer(Exchange):
    def __init__(self, settings: DialerSettings) -> None:
        super().__init__(settings.reconnect_s)
        self._settings = settings
        # Id of the relay whose calls are in flight.
        self._relay = ""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises:
            RelayRefused: reconnecting is useless; the message says why.
        """
        async with AsyncExitStack() as stack:
            outside = await stack.enter_async_context(
                # `trust_env` respects HTTPS_PROXY.
                aiohttp.ClientSession(trust_env=True, cookie_jar=aiohttp.DummyCookieJar())
            )
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_GATEWAY_KEEPALIVE_S),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                )
            )
            stack.push_async_callback(self._end_calls)
            while True:
                link = await retry(
                    lambda: self._dial(outside), _NoLink, _BACKOFF, before_sleep=log_retry(log, "dialling out")
                )
                log.info("connected to %s", self._settings.url)
                try:
                    await self.serve(link)
                except LinkClosed as closed:
                    _stop_if_refused(closed)
                    log.warning("the connection to the relay ended (code %s)", closed.code)
                except FrameError as error:
                    log.error("the relay does not speak the protocol: %s", error)  # noqa: TRY400
                    await link.close(Close.BROKEN_FRAME, str(error))
                finally:
                    await link.close()
                await asyncio.sleep(random.uniform(0, _BACKOFF.multiplier))  # noqa: S311

    async def _dial(self, outside: aiohttp.ClientSession) -> Link:
        settings = self._settings
        try:
            async with asyncio.timeout(_CONNECT_S):
                socket = await outside.ws_connect(
                    f"{settings.url.rstrip('/')}/relay",
                    heartbeat=settings.heartbeat_s,
                    max_msg_size=MAX_FRAME,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _NoLink(f"{settings.url} cannot be reached: {error!r}") from None
        link = Link(socket, settings.heartbeat_s)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                relay = await self._handshake(link)
        except LinkClosed as closed:
            _stop_if_refused(closed)
            raise _NoLink(f"{settings.url} ended the handshake (code {closed.code})") from None
        except TimeoutError:
            await link.close()
            raise _NoLink(f"{settings.url} did not complete the handshake in time") from None
        except FrameError as error:
            await link.close(Close.BROKEN_FRAME, str(error))
            # Another server may answer while the relay or its proxy restarts.
            raise _NoLink(f"{settings.url} is not the expected relay: {error}") from None
        except RelayRefused:
            await link.close(Close.WRONG_VERSION)
            raise
        if relay != self._relay:
            self.fail_calls(CallLost(502, "the relay restarted"))
            self._relay = relay
        return link

    async def _handshake(self, link: Link) -> str:
        """Perform the handshake and return the relay's id."""
        key = self._settings.key.get_secret_value()
        challenge = await link.receive()
        if not isinstance(challenge, Challenge):
            raise FrameError(f"a {type(challenge).__name__} instead of a Challenge")
        if challenge.version != VERSION:
            raise RelayRefused(_REFUSALS[Close.WRONG_VERSION])
        hello = make_hello(key, challenge, self._settings.dialer_id)
        await link.send_now(hello)
        welcome = await link.receive()
        if not isinstance(welcome, Welcome) or not verify_relay(key, challenge, hello, welcome):
            raise FrameError("it does not know the key")
        return challenge.relay_id

    # --- calls --------------------------------------------------------------------------------------------

    def on_open(self, frame: Open) -> None:
        channel = self.channels.get(frame.call)
        if channel is None:
            if len(self._tasks) >= self._settings.max_calls:
                raise FrameError(f"more than {self._settings.max_calls} calls at once")
            channel = self.channels[frame.call] = Channel(frame.call, self.send)
            self._tasks[frame.call] = task = asyncio.create_task(self._call(channel))
            task.add_done_callback(report_failure("a call through the relay"))
        channel.on_frame(frame)

    def on_cancel(self, call: int) -> None:
        self.channels.pop(call, None)
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    def on_unknown_call(self, channel: Channel) -> None:
        # No agent waits for the call.
        self.on_cancel(channel.call)

    def fail_calls(self, failure: CallLost) -> None:
        super().fail_calls(failure)
        for task in self._tasks.values():
            task.cancel()

    async def _end_calls(self) -> None:
        self.fail_calls(CallLost(503, "the training side is stopping"))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _call(self, channel: Channel) -> None:
        """Make one call, and return once the relay has processed its complete answer."""
        try:
            async with asyncio.timeout(self._settings.call_s):
                opened = await channel.receive()
                assert isinstance(opened, Open)
                channel.mark_processed(now=True)
                await self._forward(channel, opened)
                await channel.drain()
        except TimeoutError:
            log.warning("a call exceeded its time limit of %g s", self._settings.call_s)
        except CallLost as lost:
            log.info("a call was lost: %s", lost)
        finally:
            if self.channels.get(channel.call) is channel:
                del self.channels[channel.call]
            if self._tasks.get(channel.call) is asyncio.current_task():
                del self._tasks[channel.call]

    async def _forward(self, channel: Channel, opened: Open) -> None:
        begun = False
        found = route(opened.path)
        base = self._settings.gateways.get(found[0]) if found is not None else None
        if found is None or base is None or opened.method not in METHODS:
            await _answer(channel, 404, "no such gateway or path")
            return
        try:
            headers = CIMultiDict(forwarded_headers(opened.headers))
            if not opened.has_body:
                headers.popall("Content-Length", None)
            async with self._http.request(
                opened.method,
                URL(base.rstrip("/") + found[1], encoded=True),
                headers=headers,
                data=_body(channel) if opened.has_body else None,
                allow_redirects=False,
            ) as response:
                head = forwarded_headers(response.headers.items())
                begun = True
                await channel.send(Head, response.status, head)
                async for read in response.content.iter_any():
                    for data in chunks(read):
                        await channel.send(Chunk, data)
                await channel.send(End)
        except (aiohttp.ClientError, ValueError) as error:
            log.warning("a call to the gateway failed: %s", _without_url(error))
            if begun:
                await channel.send(Abort)
            else:
                await _answer(channel, 502, "the gateway does not answer")


async def _body(channel: Channel) -> AsyncIterator[bytes]:
    while isinstance(frame := await channel.receive(), Chunk):
        yield frame.data
        channel.mark_processed()
    channel.mark_processed(now=True)


async def _answer(channel: Channel, status: int, message: str) -> None:
    body = error_body(status, message)
    headers = (*error_headers(status).items(), ("Content-Length", str(len(body))))
    await channel.send(Head, status, headers)
    await channel.send(Chunk, body)
    await channel.send(End)


def _without_url(error: Exception) -> str:
    """Describe an error without its request, whose URL and headers may contain a session key."""
    return f"{error.status} {error.message}" if isinstance(error, aiohttp.ClientResponseError) else repr(error)


def _stop_if_refused(closed: LinkClosed) -> None:
    if closed.code in _REFUSALS:
        raise RelayRefused(_REFUSALS[Close(closed.code)]) from None


def main() -> None:
    configure_logs(logging.INFO, in_thread=True)
    settings = DialerSettings.model_validate_json(sys.stdin.buffer.read())
    try:
        asyncio.run(Dialer(settings).run())
    except RelayRefused as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
