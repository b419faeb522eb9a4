"""Open aioboto3 clients with explicit timeouts and no hidden retries."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
)
from botocore.loaders import Loader, create_loader
from botocore.parsers import ResponseParserError
from botocore.utils import deep_merge

from rollout_backend.aws.call_log import log_call
from rollout_backend.aws.connection import Response
from rollout_backend.aws.errors import is_html
from rollout_backend.aws.http_session import HTTPSession
from rollout_backend.aws.repeated_call import RepeatedCall


class Client:
    """An aiobotocore client, with all its methods."""

    def __init__(self, client: Any, http: HTTPSession, retries: int) -> None:
        self._client = client
        self._http = http
        self._retries = retries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def repeated(self, method: str, **fixed: Any) -> RepeatedCall:
        """Return a method that takes the arguments besides `fixed`, for calls that are made often. The endpoint must
        follow from `fixed`."""
        return RepeatedCall(self._client, self._http, method, fixed, retries=self._retries > 0)


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
) -> AsyncIterator[Client]:
    """Open a client of one service.

    `retries` is the number of botocore's own retries. Leave it 0 for calls that are not idempotent, such as an
    invoke. `newer_fields` is merged into botocore's model of the service: fields that this botocore does not know
    yet.
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
        s3={"addressing_style": "path"} if endpoint_url else {},
        tcp_keepalive=True,
    )
    core = _session()
    newer = (service, json.dumps(newer_fields)) if newer_fields is not None else None
    core.register_component("data_loader", _loader(core.get_config_variable("data_path"), newer))
    # Its types list every service by name, and lag behind the services.
    session: Any = aioboto3.Session(botocore_session=core)
    plain = endpoint_url is not None and endpoint_url.startswith("http://")
    async with session.client(
        service,
        region_name=region,
        endpoint_url=endpoint_url,
        config=config,
        verify=False if plain else None,  # without TLS there is nothing to verify: spares reading the certificates
    ) as made:
        [http] = sessions
        made.meta.events.register("before-parse", _drop_html)
        made.meta.events.register("after-call", _log_call)
        yield Client(made, http, retries)


def _session() -> AioSession:
    core = AioSession()
    core.register_component("credential_provider", _CredentialProvider(core.get_component("credential_provider")))
    return core


def _drop_html(*, response_dict: dict[str, Any], operation_model: Any, **_: Any) -> None:
    """Drop the HTML page that a proxy or a wrong server answers with, which would become an error's message."""
    if operation_model.has_streaming_output or not is_html(response_dict["body"]):
        return
    status = response_dict["status_code"]
    if status < 300:
        raise ResponseParserError(f"{operation_model.name} is answered {status} with an HTML page, not by AWS")
    # Without a body, most of botocore's parsers take the code from the status; the one of `query` fails.
    is_query = operation_model.service_model.resolved_protocol == "query"
    error = f"<ErrorResponse><Error><Code>{status}</Code><Message>an HTML page</Message></Error></ErrorResponse>"
    response_dict["body"] = error.encode() if is_query else b""


def _log_call(*, parsed: Mapping[str, Any], model: Any, http_response: Any, **_: Any) -> None:
    code = str(parsed.get("Error", {}).get("Code", ""))
    log_call(model.service_model.signing_name, model.name, http_response.status_code, code)


@dataclass(frozen=True)
class CredentialsFound:
    """The credentials that this process's clients use."""

    source: str
    temporary: bool
    expires_at: datetime | None


async def credentials() -> CredentialsFound:
    """Find this process's credentials. Raises botocore's errors of credentials."""
    found: Any = await _session().get_credentials()
    if found is None:
        raise NoCredentialsError
    frozen = await found.get_frozen_credentials()
    return CredentialsFound(found.method, frozen.token is not None, getattr(found, "_expiry_time", None))


@functools.cache
def _loader(data_path: str | None, newer: tuple[str, str] | None) -> Loader:
    """Cache botocore's service models; loading one takes 0.3 s. `newer`: a service and its newer fields, as JSON."""
    loader = create_loader(data_path)  # keeps what it has loaded, and clients are made from that
    if newer is not None:
        service, fields = newer
        deep_merge(loader.load_service_model(service, "service-2"), json.loads(fields))
    return loader


class _CredentialProvider:
    """A session's chain of credential providers. Other exceptions, such as those of a `credential_process` that
    cannot be started or prints no JSON, become CredentialRetrievalError."""

    def __init__(self, chain: Any) -> None:
        self._chain = chain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    async def load_credentials(self) -> Any:
        credentials = await _retrieve(self._chain.load_credentials())
        return credentials and _Credentials(credentials)


class _Credentials:
    """Credentials whose renewal raises only botocore's exceptions."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __getattr__(self, name: str) -> Any:
        return getattr(self._credentials, name)

    async def get_frozen_credentials(self) -> Any:
        return await _retrieve(self._credentials.get_frozen_credentials(), self.method)


async def _retrieve(credentials: Awaitable[Any], provider: str = "the AWS configuration") -> Any:
    try:
        return await credentials
    except (BotoCoreError, ClientError):
        raise
    except Exception as error:
        raise CredentialRetrievalError(provider=provider, error_msg=f"{type(error).__name__}: {error}") from error


async def read_up_to(reply: Response | aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the first `limit` bytes of a body, without reading the rest."""
    data = bytearray()
    async for piece in reply.content.iter_any():
        data += piece
        if len(data) >= limit:
            break
    return bytes(data[:limit])
