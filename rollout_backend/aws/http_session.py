"""Manage the connections of one aiobotocore client, also for requests that are prepared elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp
import yarl
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import HTTPClientError

from rollout_backend.aws.signer import Request


class HTTPSession(AIOHTTPSession):
    """Opens no connection after it is closed. aiobotocore's session would: a call that outlives its client would
    leave a connection open."""

    _closed = False

    async def __aexit__(self, *exc_info: Any) -> None:
        self._closed = True
        await super().__aexit__(*exc_info)

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        if self._closed:
            raise HTTPClientError(error="the client is closed")
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in its stubs
        return session

    async def route(self, url: str) -> Route:
        """Return the route to an endpoint, with aiobotocore's proxies, certificates and timeouts.

        These have no public names in aiobotocore; aioboto3 pins its version.
        """
        proxies: Any = self._proxy_config  # type: ignore[attr-defined]  # not in its stubs
        proxy = proxies.proxy_url_for(url)
        return Route(await self._get_session(proxy), proxy, proxies.proxy_headers_for(url))


@dataclass(frozen=True)
class Route:
    """The route to one endpoint."""

    http: aiohttp.ClientSession
    proxy: str | None
    proxy_headers: dict[str, str]

    async def send(self, request: Request) -> aiohttp.ClientResponse:
        """Send a request. Raises HTTPClientError for a closed client or an invalid header, else aiohttp's errors."""
        if self.http.closed:
            raise HTTPClientError(error="the client is closed")
        try:
            return await self.http.request(
                request.method,
                yarl.URL(request.url, encoded=True),
                headers=request.headers,
                data=request.body or None,
                proxy=self.proxy,
                proxy_headers=self.proxy_headers,
            )
        except aiohttp.ClientError:
            raise
        except ValueError as error:
            raise HTTPClientError(error=error) from error
