"""The connections of one aiobotocore client, and the cheapest way over them for frequent calls."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import yarl
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import HTTPClientError

from rollout_backend.aws.connection import Response
from rollout_backend.aws.connection_pool import ConnectionPool
from rollout_backend.aws.signer import Request


class Route(Protocol):
    """The way to one endpoint."""

    async def send(self, request: Request) -> Response | aiohttp.ClientResponse: ...


class HTTPSession(AIOHTTPSession):
    """Opens no connection once it is closed. aiobotocore's would, and a call that outlived its client would leave it
    open."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pools: dict[yarl.URL, ConnectionPool] = {}
        self._closed = False

    async def __aexit__(self, *exc_info: Any) -> None:
        self._closed = True
        for pool in self._pools.values():
            await pool.aclose()
        await super().__aexit__(*exc_info)

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        if self._closed:
            raise HTTPClientError(error="the client is closed")
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in its stubs
        return session

    async def route(self, url: str) -> Route:
        """Return the way to an endpoint: through aiohttp if there is a proxy.

        Its proxies, certificates and timeouts are those of aiobotocore, which has no public names for them; aioboto3
        pins its version.
        """
        session: Any = self
        proxy = session._proxy_config.proxy_url_for(url)
        http = await self._get_session(proxy)
        origin = yarl.URL(url, encoded=True).origin()
        tls = http.connector._ssl if origin.scheme == "https" else None  # type: ignore[union-attr]
        if proxy is not None or not isinstance(tls, ssl.SSLContext | None):
            return _ThroughAiohttp(http, proxy, session._proxy_config.proxy_headers_for(url))
        if origin not in self._pools:
            self._pools[origin] = ConnectionPool(
                origin,
                tls,
                limit=session._max_pool_connections,
                connect_timeout_s=session._timeout.sock_connect,
                read_timeout_s=session._timeout.sock_read,
                keepalive_s=session._connector_args["keepalive_timeout"],
            )
        return _Direct(self._pools[origin])


@dataclass(frozen=True)
class _ThroughAiohttp:
    http: aiohttp.ClientSession
    proxy: str | None
    proxy_headers: dict[str, str]

    async def send(self, request: Request) -> aiohttp.ClientResponse:
        return await self.http.request(
            request.method,
            yarl.URL(request.url, encoded=True),
            headers=request.headers,
            data=request.body or None,
            proxy=self.proxy,
            proxy_headers=self.proxy_headers,
        )


@dataclass(frozen=True)
class _Direct:
    pool: ConnectionPool

    async def send(self, request: Request) -> Response:
        target = "/" + request.url.partition("://")[2].partition("/")[2]
        lines = [
            f"{request.method} {target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in request.headers.items()),
        ]
        if "Accept" not in request.headers:
            lines.append("Accept: */*")  # as aiohttp does
        if request.body or request.method != "GET":
            lines.append(f"Content-Length: {len(request.body)}")
        head = "\r\n".join(lines)
        if head.count("\r") != len(lines) - 1 or head.count("\n") != len(lines) - 1:
            raise HTTPClientError(error="a header contains a line break")
        return await self.pool.send(
            b"%b\r\n\r\n%b" % (head.encode(), request.body), idempotent=request.method in ("GET", "HEAD", "PUT")
        )
