"""Base of the local cloud's proxies: the server, the HTTP client, and the signature of a call."""

import re
from typing import NamedTuple, Self

import aiohttp
import yarl
from aiohttp import web

from rollout_backend.base.addresses import host_port

HOP_BY_HOP = frozenset({"connection", "expect", "keep-alive", "transfer-encoding", "content-length"})
_CREDENTIAL = re.compile(r"Credential=([^/&,]+)/\d+/[^/]+/([^/]+)/aws4_request")
_MAX_BYTES = 2**30


class Signature(NamedTuple):
    """The key that signed a call, and the service that it was signed for. Not verified."""

    access_key: str
    service: str


def signature_of(request: web.Request) -> Signature | None:
    """Return the signature in a call's headers or query; None for an unsigned call."""
    signature = request.headers.get("Authorization") or "Credential=" + request.query.get("X-Amz-Credential", "")
    found = _CREDENTIAL.search(signature)
    return Signature(*found.groups()) if found else None


class HttpProxy:
    """An async context manager that serves every request at `url` with `_serve`."""

    def __init__(self) -> None:
        self.url = ""
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A hung call ends when its client disconnects.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host_port(host, port)}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        assert self._http is not None
        await self._runner.cleanup()
        await self._http.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    async def _forward(self, upstream: str, request: web.Request, body: bytes, without: str = "") -> web.Response:
        """Forward the call to `upstream`, without the header `without`. Return the response; 502 if none."""
        assert self._http is not None
        left_out = {*HOP_BY_HOP, without.lower()}
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in left_out]
        # The URL must stay as it was signed.
        url = yarl.URL(upstream + request.raw_path, encoded=True)
        try:
            async with self._http.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as reply:
                content = await reply.read()
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"no answer from {upstream}: {error}")
        answer = web.Response(status=reply.status, body=content)
        answer.headers.popall("Content-Type", None)
        for name, value in reply.headers.items():
            if name.lower() not in HOP_BY_HOP:
                answer.headers.add(name, value)
        if request.method == "HEAD":
            answer.headers["Content-Length"] = reply.headers.get("Content-Length", "0")
        return answer
