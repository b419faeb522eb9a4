"""Connections to one server, opened when they are needed and kept for further calls."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl

import aiohappyeyeballs
import aiohttp
from botocore.exceptions import EndpointConnectionError, HTTPClientError
from yarl import URL

from rollout_backend.aws.connection import Connection, Response

_ADDRESS_S = 10.0  # for how long an address is kept, as by aiohttp
_HAPPY_EYEBALLS_S = 0.25  # RFC 8305's delay before the next address is tried


class CannotConnect(EndpointConnectionError):
    """No connection could be opened. botocore's message lacks the reason."""

    fmt = 'Could not connect to the endpoint URL: "{endpoint_url}": {error}'


class ConnectionPool:
    """The connections to one origin, at most `limit` of them."""

    def __init__(
        self,
        origin: URL,
        tls: ssl.SSLContext | None,
        *,
        limit: int,
        connect_timeout_s: float,
        read_timeout_s: float,
        keepalive_s: float,
    ) -> None:
        self._origin = origin
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._keepalive_s = keepalive_s
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[Connection] = []  # the last used is the last
        self._open: set[Connection] = set()
        self._resolving = asyncio.Lock()
        self._addresses: list[aiohappyeyeballs.AddrInfoType] = []
        self._resolved_at = 0.0
        self._closed = False

    async def send(self, request: bytes, *, idempotent: bool) -> Response:
        """Send a request on a kept connection or a new one.

        If a kept connection is closed before a response began, an idempotent request is sent on a new one, as by
        aiohttp.

        Raises:
            CannotConnect: no connection could be opened.
            HTTPClientError: the pool is closed.
            aiohttp.ClientError: there is no response.
        """
        await self._slots.acquire()
        kept = self._take_idle()
        try:
            if kept is not None:
                return await kept.call(request)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if not idempotent:
                raise
            await self._slots.acquire()
        try:
            connection = await self._connect()
        except BaseException:
            self._slots.release()
            raise
        return await connection.call(request)

    async def aclose(self) -> None:
        """Close every connection. Calls in progress fail."""
        self._closed = True
        for connection in self._open:
            connection.abort()
        await asyncio.gather(*(connection.closed for connection in self._open))

    def _take_idle(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - self._keepalive_s
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.last_active >= oldest:
                return connection
            connection.abort()
        return None

    def _on_idle(self, connection: Connection) -> None:
        self._slots.release()
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        if self._closed:
            raise HTTPClientError(error="the client is closed")
        loop, url = asyncio.get_running_loop(), str(self._origin)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = await self._resolve()
                sock = await aiohappyeyeballs.start_connection(
                    random.sample(addresses, len(addresses)), happy_eyeballs_delay=_HAPPY_EYEBALLS_S, interleave=1
                )
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection = Connection(self._read_timeout_s, self._on_idle)
                host = self._origin.host if self._tls is not None else None
                await loop.create_connection(lambda: connection, sock=sock, ssl=self._tls, server_hostname=host)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from error
        except OSError as error:
            self._addresses = []
            raise CannotConnect(endpoint_url=url, error=error) from error
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._open.discard(connection))
        if self._closed:
            connection.abort()
            raise HTTPClientError(error="the client is closed")
        return connection

    async def _resolve(self) -> list[aiohappyeyeballs.AddrInfoType]:
        loop = asyncio.get_running_loop()
        async with self._resolving:
            if not self._addresses or loop.time() > self._resolved_at + _ADDRESS_S:
                found = await loop.getaddrinfo(self._origin.host, self._origin.port, type=socket.SOCK_STREAM)
                self._addresses, self._resolved_at = list(found), loop.time()
            return self._addresses
