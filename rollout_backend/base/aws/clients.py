"""Open aioboto3 clients with explicit timeouts, no hidden retries, and credentials that are renewed in the
background."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.hooks import AioHierarchicalEmitter
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.exceptions import (
    BotoCoreError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    ReadTimeoutError,
)
from botocore.handlers import add_expect_header
from botocore.loaders import Loader, create_loader
from botocore.parsers import ResponseParserError
from botocore.utils import deep_merge, parse_timestamp
from multidict import CIMultiDict

from rollout_backend.base import local_keys
from rollout_backend.base.addresses import is_loopback
from rollout_backend.base.aws.errors import UNSIGNED, is_foreign, log_call, mark_renewable
from rollout_backend.base.aws.repeated_call import UNSENT, RepeatedCall, Request
from rollout_backend.errors import PreflightError

log = logging.getLogger(__name__)

# botocore renews credentials this long before they expire, too.
_RENEW_BEFORE_S = 15 * 60
# Credentials that last this long are used if they cannot be renewed.
_USABLE_S = 60
_RENEWAL_S = 60.0
# botocore's names of the sources that cannot change while this process runs.
_FIXED_SOURCES = ("env", "explicit")
# Services and operations that are newer than the botocore that aioboto3 pins, from botocore 1.44.8.
_NEWER_SERVICES = Path(__file__).parent / "service_models"
# A large body may take longer than a small one.
_SLOWEST_BYTES_PER_S = 1024**2


class HTTPSession(AIOHTTPSession):
    """Ends each request in time, and opens no connection after it is closed. aiobotocore's session does neither: a
    call that outlives its client would leave a connection open."""

    _closed = False

    def __init__(self, *, timeout: tuple[float, float], **options: Any) -> None:
        super().__init__(timeout=timeout, **options)  # type: ignore[arg-type]
        # aiohttp's read timeout starts again with each byte, and only once the request is sent. Nothing limits the
        # wait for a connection of the pool.
        self.limit_s = timeout[0] + 2 * timeout[1]

    async def send(self, request: Any) -> Any:
        """Send a request, and return its response. The caller reads a streamed body, and limits the time for that.

        Raises ReadTimeoutError if there is no response in time, even if the service takes the body byte by byte.
        """
        length = request.headers.get("X-Amz-Decoded-Content-Length") or request.headers.get("Content-Length") or 0
        limit_s = self.limit_s + int(length) / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                return await super().send(request)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from error

    async def __aexit__(self, *exc_info: Any) -> None:
        self._closed = True
        await super().__aexit__(*exc_info)

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        if self._closed:
            raise HTTPClientError(error="the client is closed")
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]
        # botocore keeps no cookies either. A load balancer's cookie would send all sessions to one server.
        session._cookie_jar = aiohttp.DummyCookieJar()
        return session


class Client:
    """An aiobotocore client with all its methods."""

    def __init__(self, client: Any, http: HTTPSession, retries: int, credentials: Credentials) -> None:
        self.credentials = credentials
        self._client = client
        self._http = http
        self._retries = retries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def repeated(self, method: str, **fixed: Any) -> RepeatedCall:
        """Return a faster method for frequent calls, which takes the arguments besides `fixed`. The endpoint must
        depend only on `fixed`."""
        retries, limit_s = self._retries > 0, self._http.limit_s
        on_reply = self.credentials.on_reply
        return RepeatedCall(
            self._client, self._http, method, fixed, retries=retries, limit_s=limit_s, on_reply=on_reply
        )

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Send a request to a presigned URL, through the proxies and with the certificates of other calls. Return the
        status and the start of the response's body. Raises one of `NO_ANSWER`."""
        request: Any = Request(method, url, CIMultiDict(headers), body or None, {})
        async with (await self._http.send(request)).raw as response, asyncio.timeout(self._http.limit_s):
            return response.status, await read_up_to(response, 10_000)


@asynccontextmanager
async def client(
    service: str,
    *,
    region: str,
    endpoint_url: str | None = None,
    connect_timeout_s: float = 5.0,
    read_timeout_s: float = 30.0,
    connections: int = 64,
    retries: int = 0,
    newer_fields: Mapping[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Client]:
    """Open a client of one service.

    `retries` is the number of botocore's own retries. Leave it 0 for calls that are not idempotent, such as an
    invoke. `newer_fields` are fields that this botocore does not know yet; they are merged into its model of the
    service. `more` are further arguments of `AioConfig`.

    Raises:
        PreflightError: the AWS settings of this process, such as AWS_PROFILE, make no client.
    """
    sessions: list[HTTPSession] = []

    def http_session(**options: Any) -> HTTPSession:
        sessions.append(HTTPSession(**options))
        return sessions[-1]

    config = AioConfig(
        http_session_cls=cast(type[AIOHTTPSession], http_session),
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=connections,
        retries={"total_max_attempts": 1 + retries, "mode": "standard"},
        tcp_keepalive=True,
        # botocore would send calls of `[::1]` to the user's proxy, even if NO_PROXY contains it.
        proxies={} if is_loopback(urlsplit(endpoint_url or "").hostname or "") else None,
        **{"s3": {"addressing_style": "path"} if endpoint_url else {}, **more},
    )
    plain = endpoint_url is not None and endpoint_url.startswith("http://")
    async with AsyncExitStack() as stack:
        try:
            core = _session((service, json.dumps(newer_fields)) if newer_fields is not None else None)
            core.register_component("credential_provider", Credentials(endpoint_url))
            core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
            await asyncio.to_thread(_preload, core.get_component("data_loader"), service)
            # The types have one overload per service, and lag behind the services.
            session: Any = aioboto3.Session(botocore_session=core)
            made = await stack.enter_async_context(
                session.client(
                    service,
                    region_name=region,
                    endpoint_url=endpoint_url,
                    config=config,
                    # Without TLS, this avoids loading the certificates.
                    verify=False if plain else None,
                )
            )
        except (BotoCoreError, OSError, ValueError) as error:
            raise PreflightError(
                f"the AWS settings cannot be used: {str(error).rstrip('.')}. Check AWS_PROFILE, the files in ~/.aws, "
                "and aws.region"
            ) from error
        [http] = sessions
        # This runs first: botocore's handler for S3 takes every 200 that is not XML for a 500, and retries it.
        made.meta.events.register_first("before-parse", _drop_foreign)
        made.meta.events.register("after-call", _log_call)
        credentials: Any = await core.get_credentials()
        made.meta.events.register("after-call", credentials.on_reply)
        yield Client(made, http, retries, credentials)


def _session(newer: tuple[str, str] | None = None) -> AioSession:
    core = AioSession(event_hooks=copy.copy(_builtin_handlers()), include_builtin_handlers=False)
    core.register_component("data_loader", _loader(core.get_config_variable("data_path"), newer))
    return core


@functools.cache
def _builtin_handlers() -> AioHierarchicalEmitter:
    """Register botocore's handlers once: that is most of the cost of a session, and each client has two."""
    handlers = AioHierarchicalEmitter()
    AioSession(event_hooks=handlers)
    # With `Expect: 100-continue`, aiohttp waits for the 100 without a limit, and a small write takes twice as long.
    handlers.unregister("before-call.s3", add_expect_header)
    return handlers


def _timestamp(sent: Any) -> datetime:
    """Parse a timestamp. botocore's parser would take three quarters of the CPU time of listing a step's results."""
    try:
        return datetime.fromisoformat(sent)
    except (TypeError, ValueError):
        # The value is not an ISO 8601 timestamp, which S3 sends for each key.
        return parse_timestamp(sent)


def _drop_foreign(*, response_dict: dict[str, Any], operation_model: Any, **_: Any) -> None:
    """Drop the body of a proxy or a wrong server: it would become the error's message, or no parser could read it."""
    if operation_model.has_streaming_output or not is_foreign(response_dict["body"]):
        return
    status = response_dict["status_code"]
    if status < 300:
        raise ResponseParserError(f"{operation_model.name} is answered {status}, but not by AWS")
    # Without a body, most of botocore's parsers take the code from the status; the parser of `query` fails.
    is_query = operation_model.service_model.resolved_protocol == "query"
    error = f"<ErrorResponse><Error><Code>{status}</Code><Message>not by AWS</Message></Error></ErrorResponse>"
    response_dict["body"] = error.encode() if is_query else b""


def _log_call(*, parsed: Mapping[str, Any], model: Any, http_response: Any, **_: Any) -> None:
    if http_response is not UNSENT:
        code = str(parsed.get("Error", {}).get("Code", ""))
        log_call(model.service_model.signing_name, model.name, http_response.status_code, code)


@functools.cache
def _loader(data_path: str | None, newer: tuple[str, str] | None) -> Loader:
    """Cache botocore's service models; loading one takes 0.3 s. `newer` is a service and its newer fields in JSON."""
    # Clients are created from the models that the loader has cached.
    loader = create_loader(os.pathsep.join([*filter(None, [data_path]), str(_NEWER_SERVICES)]))
    if newer is not None:
        service, fields = newer
        deep_merge(loader.load_service_model(service, "service-2"), json.loads(fields))
    return loader


def added_operations(service: str) -> frozenset[str]:
    """Return the names of the operations that this package adds to botocore's, of a service and of its runtimes."""
    models = (json.loads(path.read_bytes()) for path in _NEWER_SERVICES.glob(f"{service}*/*/service-2*.json"))
    return frozenset(name for model in models for name in model.get("merge", model)["operations"])


def _preload(loader: Loader, service: str) -> None:
    """Load what a client of this service needs, which takes half a second the first time."""
    for kind in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model(service, kind, api_version=None)
    for name in ("endpoints", "partitions", "_retry"):
        loader.load_data(name)
    if service == "s3":
        importlib.import_module("aioboto3.s3.inject")


class Credentials:
    """The credentials of a session. They replace botocore's credentials and its chain of providers.

    They are found on first use and renewed before they expire, each time by a new chain of providers, because a chain
    caches what it found, even if it found nothing. They are also renewed after a service has refused them: a file may
    hold new ones, and a metadata service may be late. Concurrent calls share one renewal and its failure. A call
    waits for it if its credentials are unusable or were refused. The endpoint of a local cloud has its own key.
    """

    def __init__(self, endpoint_url: str | None = None, *, pause_s: float = 10.0) -> None:
        """`pause_s` is the minimum time between two renewals of usable credentials."""
        self._endpoint_url = endpoint_url
        self._pause_s = pause_s
        # `_found` are botocore's credentials, and `_refused` the frozen ones that a service has refused.
        self._found: Any = None
        self._frozen: Any = None
        self._refused: Any = None
        self._renewing: asyncio.Task[None] | None = None
        # Loop time when the last renewal ended, even if it failed.
        self._renewed_at = float("-inf")

    async def load_credentials(self) -> Self:
        return self

    @property
    def method(self) -> str | None:
        """botocore's name for the source of the credentials; None before the first search."""
        return getattr(self._found, "method", None)

    @property
    def expires_at(self) -> datetime | None:
        """Expiry time; None if they do not expire, or if it is unknown."""
        return getattr(self._found, "_expiry_time", None)

    def get_deferred_property(self, name: str) -> Any:
        # aiobotocore calls `get_account_id` instead.
        return None

    async def get_account_id(self) -> str | None:
        account: str | None = (await self.get_frozen_credentials()).account_id
        return account

    async def get_frozen_credentials(self, lasting_s: float = 0.0) -> Any:
        """Return the current credentials. If they expire within `lasting_s`, try to renew them first.

        Raises one of `UNSIGNED` if there are no credentials, or if they expire and could not be renewed.
        """
        refused = self._refused is not None and self._refused is self._frozen
        if not refused and self._last_for(max(_RENEW_BEFORE_S, lasting_s)):
            return self._frozen
        usable = self._last_for(_USABLE_S)
        if not usable or asyncio.get_running_loop().time() >= self._renewed_at + self._pause_s:
            renewing = self._renew()
            if not usable:
                await asyncio.shield(renewing)
            elif refused or not self._last_for(lasting_s):
                await asyncio.wait([renewing])
        return self._frozen

    def on_reply(self, *, parsed: dict[str, Any], **_: Any) -> None:
        """Note a refusal of the credentials, unless their source cannot change."""
        if self.method not in _FIXED_SOURCES and mark_renewable(parsed):
            self._refused = self._frozen

    def _last_for(self, seconds: float) -> bool:
        if self._frozen is None:
            return False
        due = getattr(self._found, "refresh_needed", None)
        return due is None or not due(seconds)

    def _renew(self) -> asyncio.Task[None]:
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._find())
            self._renewing.add_done_callback(self._on_renewed)
        return self._renewing

    def _on_renewed(self, renewing: asyncio.Task[None]) -> None:
        self._renewing = None
        self._renewed_at = asyncio.get_running_loop().time()
        if not renewing.cancelled() and (error := renewing.exception()) is not None:
            log.warning("the AWS credentials cannot be renewed; this is repeated: %s", error)

    async def _find(self) -> None:
        found: Any = None
        try:
            async with asyncio.timeout(_RENEWAL_S):
                if (key := local_keys.key_of(self._endpoint_url)) is not None:
                    found = AioCredentials(key, local_keys.SECRET, method="local cloud")
                else:
                    found = await _session().get_credentials()
                # Credentials that expire soon would be renewed immediately, so read these first.
                frozen = getattr(found, "_frozen_credentials", None)
                if found is not None and frozen is None:
                    frozen = await found.get_frozen_credentials()
        except UNSIGNED:
            raise
        except Exception as error:
            # A provider's own call failed, or its command cannot be run or prints no JSON.
            text = f"no answer within {_RENEWAL_S:g} s" if isinstance(error, TimeoutError) else str(error)
            provider = getattr(found, "method", None) or "the AWS configuration"
            raise CredentialRetrievalError(provider=provider, error_msg=f"{type(error).__name__}: {text}") from error
        if frozen is None:
            raise NoCredentialsError(endpoint_url=self._endpoint_url)
        if getattr(found, "refresh_needed", lambda seconds: False)(0):
            raise CredentialRetrievalError(provider=found.method, error_msg="what it returned has expired")
        self._found, self._frozen = found, frozen


async def read_up_to(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the first `limit` bytes of a body, without reading the rest."""
    data = bytearray()
    async for piece in reply.content.iter_any():
        data += piece
        if len(data) >= limit:
            break
    return bytes(data[:limit])
