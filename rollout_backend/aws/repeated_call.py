"""Make frequent calls of an aiobotocore client at a fifth of their CPU time.

aiobotocore evaluates endpoint rules, hooks and the user agent for each call. A `RepeatedCall` lets aiobotocore
prepare one request, and caches the results. botocore serializes further requests, and they are sent with
aiobotocore's proxies, certificates and timeouts: see `http_session`.

Invariants:

- Except for ids and dates, a request equals the one that aiobotocore would send.
- If the client retries, aiobotocore repeats a failed call, so retries, redirections and errors are aiobotocore's.
  Otherwise a call is sent once, and its errors are botocore's or aiohttp's.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiohttp
import yarl
from botocore.awsrequest import prepare_request_dict
from botocore.exceptions import ClientError, ParamValidationError
from botocore.parsers import ResponseParserError, create_parser
from botocore.serialize import create_serializer
from multidict import CIMultiDict

from rollout_backend.aws.errors import CALL_ERRORS, is_html, log_call, status_of
from rollout_backend.aws.http_session import AUTHS, HTTPSession, Request, authorize

_FINAL = (403, 404)  # statuses that aiobotocore does not retry


@dataclass(frozen=True)
class _Template:
    """The parts that the requests of all calls share."""

    endpoint: str
    headers: dict[str, str]  # except headers that depend on the arguments
    context: dict[str, Any]  # botocore's context for the signer
    signer: Any  # botocore's, which renews the client's credentials
    scope: tuple[str, str, str]  # service, region and version of signatures


class _Prepared(BaseException):
    """Raised by botocore's event `before-sign` to return the prepared request without sending it."""

    def __init__(self, event: dict[str, Any]) -> None:
        super().__init__()
        self.event = event


_preparing: ContextVar[bool] = ContextVar("_preparing", default=False)  # whether the current task prepares a call


def _before_sign(**event: Any) -> None:
    if _preparing.get():
        raise _Prepared(event)


class RepeatedCall:
    """A method of a client with some arguments fixed. Created by `Client.repeated`."""

    def __init__(self, client: Any, http: HTTPSession, method: str, fixed: dict[str, Any], *, retries: bool) -> None:
        """`retries` is whether the client retries."""
        service = client.meta.service_model
        self._client = client
        self._http = http
        self._method = method
        self._fixed = fixed
        self._retries = retries
        self._model = service.operation_model(client.meta.method_to_api_mapping[method])
        streams = self._model.has_streaming_output
        self._stream = str(self._model.output_shape.serialization["payload"]) if streams else ""
        self._service = service.signing_name
        self._serializer = create_serializer(service.resolved_protocol)
        self._parser = create_parser(service.resolved_protocol)
        self._template: _Template | None = None
        event = f"before-sign.{service.service_id.hyphenize()}.{self._model.name}"
        client.meta.events.register_last(event, _before_sign, unique_id=event)

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
                    return {self._stream: response, "ResponseMetadata": {"HTTPHeaders": _headers(response)}}
            async with response:
                body = await response.read()
            if response.status >= 300:
                raise self._refusal(response, body)
        except CALL_ERRORS as error:
            status = status_of(error) if isinstance(error, ClientError) else None
            if not self._retries or status in _FINAL or isinstance(error, ParamValidationError):
                raise
            self._template = None  # S3 may redirect aiobotocore to the bucket's region
            if status is None or status >= 500:
                await asyncio.sleep(random.random())  # noqa: S311  # as long as botocore before its first retry
            return await self._call(arguments)
        return self._parse(body)

    async def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return dict(await getattr(self._client, self._method)(**{**self._fixed, **arguments}))

    async def _prepare(self, arguments: dict[str, Any]) -> _Template | dict[str, Any]:
        """Return the template, or the answer of a `before-call` hook such as botocore's Stubber: it sends nothing."""
        token = _preparing.set(True)
        try:
            return await self._call(arguments)
        except _Prepared as prepared:
            self._template = await self._make_template(arguments, **prepared.event)
            return self._template
        finally:
            _preparing.reset(token)

    async def _make_template(
        self,
        arguments: dict[str, Any],
        *,
        request: Any,
        signing_name: str,
        region_name: str,
        signature_version: str,
        request_signer: Any,
        **_: Any,
    ) -> _Template:
        given = self._serialized(arguments)
        scheme = request.context.get("signing", {})  # of the endpoint, if it differs from the client's
        service, region = scheme.get("signing_name", signing_name), scheme.get("region", region_name)
        more = {name: value for name, value in request.headers.items() if name not in given["headers"]}
        return _Template(
            endpoint=request.url.partition("?")[0].removesuffix(given["url_path"]),
            headers={"Host": yarl.URL(request.url).host_port_subcomponent or "", **more},
            context=request.context,
            signer=request_signer,
            scope=(service, region, signature_version),
        )

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
        sent: Any = await self._http.send(request)  # type: ignore[arg-type]  # not one of botocore's
        response: aiohttp.ClientResponse = sent.raw
        return response

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes) -> ClientError:
        answer = {
            "status_code": response.status,
            "headers": _headers(response),
            "body": b"" if is_html(body) else body,
        }
        try:
            parsed = self._parser.parse(answer, self._model.output_shape)
        except (AttributeError, TypeError) as error:  # JSON, but not an object: a proxy's response
            raise ResponseParserError(f"{self._model.name} is answered {response.status}: {body[:200]!r}") from error
        code = str(parsed.get("Error", {}).get("Code", ""))
        log_call(self._service, self._model.name, response.status, code)
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


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}
