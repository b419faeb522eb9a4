"""Sign requests that are prepared elsewhere, at a quarter of botocore's CPU time, and send them over the connections
of an aiobotocore client."""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import botocore.auth
from aiobotocore.httpsession import AIOHTTPSession
from botocore.auth import SIGNED_HEADERS_BLACKLIST, S3SigV4Auth, SigV4Auth
from botocore.exceptions import HTTPClientError, NoCredentialsError
from multidict import CIMultiDict

_auth: Any = botocore.auth  # the type stubs lack attributes that its subclasses use


@dataclass
class Request:
    """An HTTP request with the attributes that botocore's signers and `HTTPSession.send` read."""

    method: str
    url: str
    headers: CIMultiDict[str]
    body: bytes | None
    context: dict[str, Any]
    params: None = None
    stream_output: bool = True  # leave it to the caller to read the body


class _Auth(SigV4Auth):
    """Computes botocore's signature in one pass: each header is read once, and each day's key is derived once."""

    def add_auth(self, request: Any) -> None:
        own: Any = self
        if own.credentials is None:
            raise NoCredentialsError
        timestamp = _auth.get_current_datetime().strftime(_auth.SIGV4_TIMESTAMP)
        request.context["timestamp"] = timestamp
        own._modify_request_before_signing(request)
        headers = sorted([(name.lower(), value) for name, value in request.headers.items()])
        signed = [(name, value) for name, value in headers if name not in SIGNED_HEADERS_BLACKLIST]
        names = ";".join([name for name, _ in signed])
        canonical = [request.method, *_path_and_query(own.__class__, request.url)]
        canonical += [f"{name}:{' '.join(value.split())}" for name, value in signed]
        canonical += ["", names, request.headers.get("X-Amz-Content-SHA256") or self.payload(request)]
        digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
        scope = f"{timestamp[:8]}/{own._region_name}/{own._service_name}/aws4_request"
        signature = _hmac(own.credentials.secret_key, scope).copy()
        signature.update(f"AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{digest}".encode())
        request.headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={own.credentials.access_key}/{scope}, SignedHeaders={names}, "
            f"Signature={signature.hexdigest()}"
        )


class _S3Auth(_Auth, S3SigV4Auth):
    pass


AUTHS: dict[str, Any] = {"v4": _Auth, "s3v4": _S3Auth}
"""The supported signature versions, by botocore's names."""


@functools.lru_cache(maxsize=16)
def _hmac(secret: str, scope: str) -> hmac.HMAC:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, digestmod="sha256")


@functools.lru_cache(maxsize=64)
def _path_and_query(kind: Any, url: str) -> tuple[str, str]:
    """Return a URL's canonical path and query."""
    signer, parts = kind(None, "", ""), urlsplit(url)
    return signer._normalize_url_path(parts.path), signer._canonical_query_string_url(parts)


def authorize(request: Request, credentials: Any, version: str, service: str, region: str) -> None:
    """Add the signature to the headers. `version` is one of `AUTHS`."""
    AUTHS[version](credentials, service, region).add_auth(request)


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
