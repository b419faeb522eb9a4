"""Make frequent calls of an aiobotocore client at a fifth of their CPU time.

aiobotocore evaluates endpoint rules, hooks and the user agent for each call. A `RepeatedCall` lets aiobotocore
prepare one request, and caches the results. A `RequestPlan` builds further requests; without a plan, botocore
serializes them. They are sent with aiobotocore's proxies, certificates and timeouts: see `http_session`.

Invariants:

- Except for ids and dates, a request equals the one that aiobotocore would send.
- If the client retries, aiobotocore repeats a failed call, so retries, redirections and errors are aiobotocore's.
  Otherwise a call is sent once, and its errors are botocore's or aiohttp's.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiohttp
import yarl
from botocore.awsrequest import prepare_request_dict
from botocore.exceptions import ClientError, ParamValidationError
from botocore.model import ListShape, OperationModel, Shape, StructureShape
from botocore.parsers import ResponseParserError, create_parser
from botocore.serialize import create_serializer
from botocore.utils import percent_encode
from multidict import CIMultiDict

from rollout_backend.aws.errors import CALL_ERRORS, is_html, log_call, status_of
from rollout_backend.aws.http_session import HTTPSession, Request, Route, Signer

_FINAL = (403, 404)  # statuses that aiobotocore does not retry
_JSON = ("json", "rest-json")  # JSON protocols
_SAFE, _SAFE_IN_GREEDY = "-._~", "/~"  # characters that botocore does not encode in a path

_Check = Callable[[Any], bool]
Rendered = tuple[str, dict[str, str], bytes]
"""URL, headers that depend on the arguments, and body."""


@dataclass(frozen=True)
class _Template:
    """The parts that the requests of all calls share."""

    endpoint: str
    plan: RequestPlan | None
    method: str
    headers: dict[str, str]  # except headers that depend on the arguments
    context: dict[str, Any]  # botocore's context for the signer
    signer: Signer
    route: Route


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
            if not template.signer.supported:
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
            if not self._retries or _is_final(error):
                raise
            return await self._fall_back(arguments, error)
        return self._parse(body)

    async def _fall_back(self, arguments: dict[str, Any], error: BaseException) -> dict[str, Any]:
        self._template = None  # S3 may redirect aiobotocore to the bucket's region
        if not isinstance(error, ClientError) or status_of(error) >= 500:
            await asyncio.sleep(random.random())  # noqa: S311  # as long as botocore before its first retry
        return await self._call(arguments)

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
        given = self._serializer.serialize_to_request({**self._fixed, **arguments}, self._model)
        scheme = request.context.get("signing", {})  # of the endpoint, if it differs from the client's
        service, region = scheme.get("signing_name", signing_name), scheme.get("region", region_name)
        more = {name: value for name, value in request.headers.items() if name not in given["headers"]}
        endpoint = request.url.partition("?")[0].removesuffix(given["url_path"])
        prepare_request_dict(given, endpoint, dict(request.context))
        return _Template(
            endpoint=endpoint,
            plan=RequestPlan.of(self._model, given, self._fixed, arguments),
            method=given["method"],
            headers={"Host": yarl.URL(request.url).host_port_subcomponent or "", **more},
            context=request.context,
            signer=Signer(request_signer, signature_version, service, region),
            route=await self._http.route(request.url),
        )

    async def _send(self, template: _Template, arguments: dict[str, Any]) -> aiohttp.ClientResponse:
        planned = None if template.plan is None else template.plan.render(arguments)
        if planned is None:
            given = self._serializer.serialize_to_request({**self._fixed, **arguments}, self._model)
            prepare_request_dict(given, template.endpoint, dict(template.context))
            planned = given["url"], given["headers"], given["body"]
        url, headers, body = planned
        request = Request(
            template.method, url, CIMultiDict({**template.headers, **headers}), body, dict(template.context)
        )
        await template.signer.sign(request)
        request.headers["amz-sdk-invocation-id"] = str(uuid4())
        request.headers["amz-sdk-request"] = "attempt=1"
        request.headers["Accept-Encoding"] = "identity"
        return await template.route.send(request)

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


def _is_final(error: BaseException) -> bool:
    """Return whether aiobotocore would get the same error again."""
    return isinstance(error, ParamValidationError) or (isinstance(error, ClientError) and status_of(error) in _FINAL)


class RequestPlan:
    """The plan for calls of one operation that differ only in the values of the same arguments. It decides once,
    instead of for each call, where each argument goes in the request.

    Invariants:

    - A plan supports strings in the path and in headers, bytes as the payload, and members of a JSON body. An
      operation with other arguments has no plan.
    - A plan renders only arguments that botocore would accept. botocore serializes or refuses all others.
    - A plan exists only if it renders the first call as botocore does.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        """`request` is the first call's request, serialized and prepared by botocore."""
        self._url: str = request["url"]
        self._headers: dict[str, str] = dict(request["headers"])
        self._body: bytes = request["body"]
        self._checks: dict[str, _Check] = {}  # one check per argument
        self._path = ""  # a format string if it contains arguments
        self._around_path = ("", "")
        self._in_path: dict[str, str] = {}  # characters that are not encoded, by argument
        self._in_headers: dict[str, str] = {}  # header name, by argument
        self._in_json: list[str] = []
        self._fixed_json: dict[str, Any] = {}
        self._payload = ""  # the argument that becomes the body

    @classmethod
    def of(
        cls,
        model: OperationModel,
        request: Mapping[str, Any],
        fixed: Mapping[str, Any],
        varying: Mapping[str, Any],
    ) -> RequestPlan | None:
        """Return a plan for calls with other values of `varying`; None if these calls cannot be planned."""
        plan, members = cls(request), _input(model).members
        if not all(plan._place(model, name, members[name]) for name in varying):
            return None
        if plan._in_path:
            base, mark, query = plan._url.partition("?")
            plan._around_path = base.removesuffix(request["url_path"]), mark + query
            plan._path = plan._path_format(model, fixed)
        if plan._in_json:
            members_sent = json.loads(plan._body)
            plan._fixed_json = {name: value for name, value in members_sent.items() if name not in varying}
        planned = plan.render(varying)
        return plan if planned == (request["url"], dict(request["headers"]), request["body"]) else None

    def render(self, varying: Mapping[str, Any]) -> Rendered | None:
        """Return a request; None if botocore has to build or refuse it."""
        if varying.keys() != self._checks.keys():
            return None
        for name, check in self._checks.items():
            if not check(varying[name]):
                return None
        url, headers, body = self._url, dict(self._headers), self._body
        if self._in_path:
            encoded = {name: percent_encode(varying[name], safe) for name, safe in self._in_path.items()}
            url = self._path.format_map(encoded).join(self._around_path)
        for name, header in self._in_headers.items():
            headers[header] = varying[name]
        if self._payload:
            body = varying[self._payload]
        elif self._in_json:
            body = json.dumps({**self._fixed_json, **{name: varying[name] for name in self._in_json}}).encode()
        return url, headers, body

    def _place(self, model: OperationModel, name: str, shape: Shape) -> bool:
        """Record where an argument goes. Return whether it can be planned."""
        location = shape.serialization.get("location")
        payload = _input(model).serialization.get("payload")
        check = _check_of(shape)
        if location == "uri" and shape.type_name == "string":
            greedy = f"{{{shape.serialization.get('name', name)}+}}" in model.http["requestUri"]
            self._in_path[name] = _SAFE_IN_GREEDY if greedy else _SAFE
        elif location == "header" and shape.type_name == "string":
            self._in_headers[name] = shape.serialization.get("name", name)
        elif name == payload and shape.type_name == "blob":
            self._payload, check = name, lambda value: type(value) is bytes
        elif location is None and payload is None and model.service_model.resolved_protocol in _JSON:
            self._in_json.append(name)
        else:
            return False
        if check is not None:
            self._checks[name] = check
        return check is not None

    def _path_format(self, model: OperationModel, fixed: Mapping[str, Any]) -> str:
        """Return the path as a format string of the varying arguments."""
        path: str = model.http["requestUri"]
        for name, shape in _input(model).members.items():
            key = shape.serialization.get("name", name)
            for placeholder, safe in ((f"{{{key}}}", _SAFE), (f"{{{key}+}}", _SAFE_IN_GREEDY)):
                if name in self._in_path:
                    path = path.replace(placeholder, f"{{{name}}}")
                elif placeholder in path:
                    path = path.replace(placeholder, percent_encode(str(fixed.get(name)), safe))
        return path


def _input(model: OperationModel) -> StructureShape:
    assert model.input_shape is not None
    return model.input_shape


def _check_of(shape: Shape) -> _Check | None:
    """Return a function that checks that a value is valid and serializes as itself; None for complex shapes."""
    if "name" in shape.serialization and shape.serialization.get("location") is None:
        return None
    least = shape.metadata.get("min")
    if shape.type_name == "string" and "jsonvalue" not in shape.serialization:
        return lambda value: type(value) is str and len(value) >= (least or 0)
    if shape.type_name == "integer":
        return lambda value: type(value) is int and (least is None or value >= least)
    if isinstance(shape, ListShape) and (item := _check_of(shape.member)) is not None:
        return lambda value: type(value) is list and len(value) >= (least or 0) and all(map(item, value))
    if isinstance(shape, StructureShape) and not (shape.is_document_type or shape.is_tagged_union):
        return functools.partial(
            _is_structure,
            {name: found for name, member in shape.members.items() if (found := _check_of(member)) is not None},
            set(shape.required_members),
        )
    return None


def _is_structure(checks: Mapping[str, _Check], required: set[str], value: Any) -> bool:
    if type(value) is not dict or not required <= value.keys():
        return False
    return all(name in checks and checks[name](member) for name, member in value.items())
