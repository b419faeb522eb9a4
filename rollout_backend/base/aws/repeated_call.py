"""Make frequent calls of an aiobotocore client at some 40 % of their CPU time.

aiobotocore evaluates endpoint rules, hooks and the user agent for each call. A `RepeatedCall` lets aiobotocore
prepare one request, and caches the results. botocore serializes further requests without validating them again. They
are signed in one pass, at a quarter of botocore's CPU time, and sent by aiobotocore's HTTP session.

Invariants:

- Except for ids and dates, a request equals the one that aiobotocore would send.
- If the client retries, aiobotocore repeats a failed call, so retries, redirections and errors are aiobotocore's.
  Otherwise a call is sent once, and its errors are botocore's or aiohttp's.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import botocore.auth
import yarl
from aiobotocore.httpsession import AIOHTTPSession
from botocore.auth import SIGNED_HEADERS_BLACKLIST, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import prepare_request_dict
from botocore.exceptions import ClientError, NoCredentialsError, ParamValidationError
from botocore.parsers import ResponseParserError, create_parser
from botocore.serialize import create_serializer
from multidict import CIMultiDict

from rollout_backend.base.aws.errors import CALL_ERRORS, is_foreign, log_call, status_of

# aiobotocore does not retry these statuses.
_FINAL = (403, 404)
_PREPARED = "prepared"


@dataclass(frozen=True)
class _Template:
    """The parts that the requests of all calls share.

    `headers` omits headers that depend on the arguments. `context` is botocore's context for the `signer`, which is
    also botocore's and renews the client's credentials. `scope` is the service, region and version of signatures.
    """

    endpoint: str
    headers: dict[str, str]
    context: dict[str, Any]
    signer: Any
    scope: tuple[str, str, str]


UNSENT = SimpleNamespace(status_code=200)
"""The response of a call that `_before_call` ended before it was sent."""
# Whether the current task prepares a call.
_preparing: ContextVar[bool] = ContextVar("_preparing", default=False)


def _before_call(*, params: dict[str, Any], request_signer: Any, **_: Any) -> Any:
    """Answer the event as botocore's Stubber does: with a response and its members. No request is sent."""
    return (UNSENT, {_PREPARED: (params, request_signer)}) if _preparing.get() else None


class RepeatedCall:
    """A method of a client with some arguments fixed. Created by `Client.repeated`."""

    def __init__(
        self,
        client: Any,
        http: AIOHTTPSession,
        method: str,
        fixed: dict[str, Any],
        *,
        retries: bool,
        limit_s: float,
        on_reply: Callable[..., object],
    ) -> None:
        """`retries` is whether the client retries. A body that is not streamed must be read within `limit_s`.
        `on_reply` gets each error as `parsed`."""
        service = client.meta.service_model
        self._client = client
        self._http = http
        self._method = method
        self._fixed = fixed
        self._retries = retries
        self._limit_s = limit_s
        self._on_reply = on_reply
        self._model = service.operation_model(client.meta.method_to_api_mapping[method])
        streams = self._model.has_streaming_output
        self._stream = str(self._model.output_shape.serialization["payload"]) if streams else ""
        self._service = service.signing_name
        self._serializer = create_serializer(service.resolved_protocol, include_validation=False)
        self._parser = create_parser(service.resolved_protocol)
        self._template: _Template | None = None
        event = f"before-call.{service.service_id.hyphenize()}.{self._model.name}"
        client.meta.events.register_last(event, _before_call, unique_id=event)

    async def __call__(self, **arguments: Any) -> dict[str, Any]:
        """Return the members of the response's JSON body. For a streamed response, return the stream, which must be
        entered, and the headers, as in aiobotocore's `ResponseMetadata`.

        Raises one of `CALL_ERRORS`.
        """
        try:
            template = self._template or await self._prepare(arguments)
            if isinstance(template, dict):
                return template
            if template.scope[2] not in AUTHS:
                return await self._call(arguments)
            response = await self._send(template, arguments)
            if response.status < 300:
                log_call(self._service, self._model.name, response.status, "")
                if self._stream:
                    return {self._stream: response, "ResponseMetadata": {"HTTPHeaders": response.headers}}
            async with response, asyncio.timeout(self._limit_s):
                body = await response.read()
            if response.status >= 300:
                raise self._refusal(response, body)
        except CALL_ERRORS as error:
            status = status_of(error) if isinstance(error, ClientError) else None
            if not self._retries or status in _FINAL or isinstance(error, ParamValidationError):
                raise
            # S3 may redirect aiobotocore to the bucket's region.
            self._template = None
            if status is None or status >= 500:
                # botocore waits this long before its first retry.
                await asyncio.sleep(random.random())  # noqa: S311
            return await self._call(arguments)
        return self._parse(body)

    async def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return dict(await getattr(self._client, self._method)(**{**self._fixed, **arguments}))

    async def _prepare(self, arguments: dict[str, Any]) -> _Template | dict[str, Any]:
        """Return the template, or the answer of a `before-call` hook such as botocore's Stubber: it sends nothing."""
        token = _preparing.set(True)
        try:
            answer = await self._call(arguments)
        finally:
            _preparing.reset(token)
        if _PREPARED not in answer:
            return answer
        request, signer = answer[_PREPARED]
        given, context = self._serialized(arguments), request["context"]
        # The endpoint's scheme may differ from the client's.
        scheme, auth_type = context.get("signing", {}), context.get("auth_type") or "v4"
        self._template = _Template(
            endpoint=request["url"].partition("?")[0].removesuffix(given["url_path"]),
            headers={
                "Host": yarl.URL(request["url"]).host_port_subcomponent or "",
                **{name: value for name, value in request["headers"].items() if name not in given["headers"]},
            },
            context=context,
            signer=signer,
            scope=(
                scheme.get("signing_name", signer.signing_name),
                scheme.get("region", signer.region_name),
                signer.signature_version if auth_type == "v4" else auth_type,
            ),
        )
        return self._template

    def _serialized(self, arguments: dict[str, Any]) -> Any:
        return self._serializer.serialize_to_request({**self._fixed, **arguments}, self._model)

    async def _send(self, template: _Template, arguments: dict[str, Any]) -> aiohttp.ClientResponse:
        given, context = self._serialized(arguments), dict(template.context)
        prepare_request_dict(given, template.endpoint, context)
        headers = CIMultiDict({**template.headers, **given["headers"]})
        request = Request(given["method"], given["url"], headers, given["body"] or None, context)
        service, region, version = template.scope
        found = await template.signer.get_auth_instance(*template.scope)
        authorize(request, found.credentials, version, service, region)
        request.headers["amz-sdk-invocation-id"] = str(uuid4())
        request.headers["amz-sdk-request"] = "attempt=1"
        sent: Any = await self._http.send(request)  # type: ignore[arg-type]
        response: aiohttp.ClientResponse = sent.raw
        return response

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes) -> ClientError:
        said = b"" if is_foreign(body) else body
        if body and not said and response.status < 500:
            # A proxy sent it, so the refusal says nothing about the session.
            raise ResponseParserError(f"{self._model.name} is answered {response.status}, but not by AWS")
        answer = {"status_code": response.status, "headers": response.headers, "body": said}
        parsed = self._parser.parse(answer, self._model.output_shape)
        code = str(parsed.get("Error", {}).get("Code", ""))
        log_call(self._service, self._model.name, response.status, code)
        self._on_reply(parsed=parsed)
        kind: type[ClientError] = self._client.exceptions.from_code(code)
        return kind(parsed, self._model.name)

    def _parse(self, body: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(body or b"{}")
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise ResponseParserError(f"the answer to {self._model.name} is not a JSON object: {body[:200]!r}")
        return reply


# --- signatures ---------------------------------------------------------------------------------------------

# The type stubs lack attributes that the subclasses use.
_auth: Any = botocore.auth


@dataclass
class Request:
    """An HTTP request with the attributes that botocore's signers and `AIOHTTPSession.send` read."""

    method: str
    url: str
    headers: CIMultiDict[str]
    body: bytes | None
    context: dict[str, Any]
    params: None = None
    stream_output: bool = True


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
