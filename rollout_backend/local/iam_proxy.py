"""A proxy in front of local S3, SQS and AgentCore that enforces IAM policies, which moto does not.

    async with IamProxy({"s3": moto, "sqs": moto}, {"TRAINER": policy_statements}) as proxy:
        ...  # clients sign with the access key TRAINER and use proxy.url as their endpoint

Invariants:

- A call passes only if a statement of its principal allows the action on every resource that AWS checks, and no
  statement denies it. A call that the proxy cannot name is refused.
- A condition operator or a policy element that is not implemented raises; it is never ignored.
- A GET of a missing object is a 403, not a 404, for a principal without `s3:ListBucket`, as on S3.

Signatures are not verified. Resource policies are not evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from rollout_backend.local.http_proxy import HttpProxy, signature_of

_ELEMENTS = frozenset({"Sid", "Effect", "Action", "Resource", "Condition"})
_BATCHES = {"DeleteMessageBatch": "DeleteMessage", "SendMessageBatch": "SendMessage"}
_CONTROL = {"PUT": "CreateAgentRuntime", "POST": "ListAgentRuntimes"}
_RUNTIME = {"GET": "GetAgentRuntime", "PUT": "UpdateAgentRuntime", "DELETE": "DeleteAgentRuntime"}

Statement = Mapping[str, Any]


@dataclass(frozen=True)
class Access:
    """One action on one resource, with the condition keys of the call."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def allowed(statements: Sequence[Statement], access: Access) -> bool:
    """Return whether these identity policies allow the access. A Deny wins."""
    effects = {statement["Effect"] for statement in statements if _applies(statement, access)}
    return "Allow" in effects and "Deny" not in effects


def _applies(statement: Statement, access: Access) -> bool:
    if unknown := statement.keys() - _ELEMENTS:
        raise NotImplementedError(f"policy elements {sorted(unknown)}")
    return (
        any(_like(access.action.lower(), pattern.lower()) for pattern in _listed(statement["Action"]))
        and any(_like(access.resource, pattern) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, access.context.get(key), _listed(values))
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _holds(operator: str, actual: str | None, values: Sequence[str]) -> bool:
    match operator:
        case "Null":
            return (actual is None) == (values[0] == "true")
        case "StringEquals" | "Bool":
            return actual in values
        case "StringLike" | "ArnLike":
            return actual is not None and any(_like(actual, value) for value in values)
    raise NotImplementedError(f"condition operator {operator}")


def _like(value: str, pattern: str) -> bool:
    wild = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wild, value, re.DOTALL) is not None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class IamProxy(HttpProxy):
    """An async context manager. `denied` holds each refused access, with the principal's access key."""

    def __init__(
        self,
        upstreams: Mapping[str, str],
        principals: Mapping[str, Sequence[Statement]],
        *,
        region: str = "us-east-1",
        account: str = "000000000000",
    ) -> None:
        """`upstreams` maps a service (`s3`, `sqs`, `bedrock-agentcore`) to its URL; `principals` maps an access key
        to the statements of its identity policies."""
        super().__init__()
        self.principals = dict(principals)
        self.denied: list[tuple[str, Access]] = []
        self.upstreams = dict(upstreams)
        self._region = region
        self._account = account

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        signature = signature_of(request)
        if signature is None:
            return _refusal("s3", "the request is not signed")
        key, service = signature
        statements = self.principals.get(key, ())
        for access in self._accesses(service, request, body):
            if not allowed(statements, access):
                self.denied.append((key, access))
                return _refusal(
                    service,
                    f"User: {key} is not authorized to perform: {access.action} on resource: {access.resource}",
                )
        answer = await self._forward(self.upstreams[service], request, body)
        if service == "s3" and answer.status == 404 and request.method in ("GET", "HEAD"):
            bucket = Access("s3:ListBucket", f"arn:aws:s3:::{request.path.split('/')[1]}")
            if not allowed(statements, bucket):
                return _refusal(service, "Access Denied")
        return answer

    def _accesses(self, service: str, request: web.Request, body: bytes) -> list[Access]:
        """Return the accesses that AWS checks before it executes the call."""
        match service:
            case "s3":
                return [self._s3(request)]
            case "sqs":
                return [self._sqs(request, json.loads(body))]
            case "bedrock-agentcore":
                return self._agentcore(request, body)
        return [Access(f"{service}:Unknown", "*")]

    def _s3(self, request: web.Request) -> Access:
        bucket, _, key = request.path.lstrip("/").partition("/")
        context = {"s3:if-none-match": request.headers["If-None-Match"]} if "If-None-Match" in request.headers else {}
        context |= {"s3:prefix": request.query["prefix"]} if "prefix" in request.query else {}
        actions = {"GET": "Get", "HEAD": "Get", "PUT": "Put", "DELETE": "Delete"}
        if key:
            return Access(
                f"s3:{actions.get(request.method, 'Unknown')}Object", f"arn:aws:s3:::{bucket}/{key}", context
            )
        listing = request.method in ("GET", "HEAD")
        return Access("s3:ListBucket" if listing else "s3:Unknown", f"arn:aws:s3:::{bucket}", context)

    def _sqs(self, request: web.Request, asked: Mapping[str, Any]) -> Access:
        operation = request.headers["X-Amz-Target"].rpartition(".")[2]
        queue = asked.get("QueueName") or asked["QueueUrl"].rpartition("/")[2]
        return Access(
            f"sqs:{_BATCHES.get(operation, operation)}", f"arn:aws:sqs:{self._region}:{self._account}:{queue}"
        )

    def _agentcore(self, request: web.Request, body: bytes) -> list[Access]:
        service, root = "bedrock-agentcore", f"arn:aws:bedrock-agentcore:{self._region}:{self._account}:runtime"
        parts = [unquote(part) for part in request.raw_path.partition("?")[0].strip("/").split("/")[1:]]
        match parts:
            case [arn, ("invocations" | "stopruntimesession") as call]:
                action = "InvokeAgentRuntime" if call == "invocations" else "StopRuntimeSession"
                endpoint = f"{arn}/runtime-endpoint/{request.query.get('qualifier', 'DEFAULT')}"
                return [Access(f"{service}:{action}", resource) for resource in (arn, endpoint)]
            case []:
                made = [Access(f"{service}:{_CONTROL[request.method]}", f"{root}/*")]
                if request.method == "PUT":
                    to = {"iam:PassedToService": f"{service}.amazonaws.com"}
                    made.append(Access("iam:PassRole", json.loads(body)["roleArn"], to))
                return made
            case [runtime]:
                return [Access(f"{service}:{_RUNTIME[request.method]}", f"{root}/{runtime}")]
            case [runtime, "runtime-endpoints", name]:
                resources = (f"{root}/{runtime}", f"{root}/{runtime}/runtime-endpoint/{name}")
                return [Access(f"{service}:GetAgentRuntimeEndpoint", resource) for resource in resources]
        return [Access(f"{service}:Unknown", request.path)]


def _refusal(service: str, message: str) -> web.Response:
    if service == "s3":
        text = f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>{message}</Message></Error>"
        return web.Response(status=403, text=text, content_type="application/xml")
    name = "AccessDeniedException"
    return web.Response(
        status=403,
        text=json.dumps({"__type": f"com.amazon.coral.service#{name}", "message": message}),
        headers={"x-amzn-errortype": name, "x-amzn-query-error": "AccessDenied;Sender"},
        content_type="application/json",
    )
