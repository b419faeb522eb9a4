"""A proxy in front of local S3, SQS and AgentCore that enforces IAM policies, which moto does not.

    async with IamProxy({"s3": moto, "sqs": moto}, {"TRAINER": policy_statements}) as proxy:
        ...  # clients sign with the access key TRAINER and use proxy.url as their endpoint

Invariants:

- A call passes only if a statement of its principal allows the action on every resource that AWS checks, and no
  statement denies it. A call that the proxy cannot name is refused.
- A condition operator or a policy element that is not implemented raises; it is never ignored.
- A GET of a missing object is a 403, not a 404, for a principal without `s3:ListBucket`, as on S3.
- A call whose date differs from the service's clock is refused: by S3 after 15 minutes, by others after 5.
- STS names every principal, and IAM simulates the policies of one, for principals that may ask it. Service Quotas
  lists `quotas`, two on a page.

Signatures are not verified. Resource policies are not evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qs, unquote

from aiohttp import web

from rollout_backend.workbench.local.http_proxy import HttpProxy, signature_of

_ELEMENTS = frozenset({"Sid", "Effect", "Action", "Resource", "Condition"})
_BATCHES = {"DeleteMessageBatch": "DeleteMessage", "SendMessageBatch": "SendMessage"}
_OF_A_BUCKET = {"versioning": "s3:GetBucketVersioning", "lifecycle": "s3:GetLifecycleConfiguration"}
_DENIED = {"s3": "AccessDenied", "iam": "AccessDenied"}  # and AccessDeniedException elsewhere
_CONTROL = {"PUT": "CreateAgentRuntime", "POST": "ListAgentRuntimes"}
_VERBS = {"GET": "Get", "PUT": "Update", "DELETE": "Delete"}

Statement = Mapping[str, Any]


@dataclass(frozen=True)
class Access:
    """One action on one resource, with the condition keys of the call."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def decision(statements: Sequence[Statement], access: Access) -> str:
    """Return `allowed`, `explicitDeny` or `implicitDeny`. A Deny wins."""
    effects = {statement["Effect"] for statement in statements if _applies(statement, access)}
    return "explicitDeny" if "Deny" in effects else "allowed" if "Allow" in effects else "implicitDeny"


def allowed(statements: Sequence[Statement], access: Access) -> bool:
    """Return whether these identity policies allow the access."""
    return decision(statements, access) == "allowed"


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
        self.accesses: list[tuple[str, Access]] = []
        """Each access that was checked, with the principal's access key."""
        self.upstreams = dict(upstreams)
        self.quotas: dict[str, float] = {}
        """The account's quotas of AgentCore, by their codes."""
        self.expired: set[str] = set()
        """Access keys whose session has expired."""
        self.clock_ahead_s = 0.0
        """How far the services' clock is ahead of ours."""
        self.bucket_regions: dict[str, str] = {}
        """The region of each bucket that is not in `region`."""
        self._region = region
        self._account = account

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        answer = await self._answer(request, await request.read())
        answer.headers["Date"] = format_datetime(self._now(), usegmt=True)
        if (signature_of(request) or ("", "s3"))[1] == "s3":
            answer.headers["x-amz-bucket-region"] = self._region_of(request)
        return answer

    async def _answer(self, request: web.Request, body: bytes) -> web.Response:
        signature = signature_of(request)
        if signature is None:
            return _refusal("s3", "AccessDenied", "the request is not signed")
        key, service = signature
        if key in self.expired:
            status = 400 if service == "s3" else 403
            return _refusal(service, "ExpiredToken", "The provided token has expired.", status)
        if self._is_skewed(request, service):
            code = "RequestTimeTooSkewed" if service == "s3" else "SignatureDoesNotMatch"
            return _refusal(service, code, "Signature expired: the difference to the server's time is too large.")
        if service == "s3" and self._region_of(request) != self._region:
            return _refusal(service, "PermanentRedirect", "The bucket is in another region.", 301)
        if service == "sts":
            return _named(f"arn:aws:sts::{self._account}:assumed-role/{key}/session", self._account)
        statements = self.principals.get(key, ())
        for access in self._accesses(service, request, body):
            self.accesses.append((key, access))
            if not allowed(statements, access):
                self.denied.append((key, access))
                return _refusal(
                    service,
                    _DENIED.get(service, "AccessDeniedException"),
                    f"User: {key} is not authorized to perform: {access.action} on resource: {access.resource}",
                )
        if service == "iam":
            return self._simulate(body)
        if service == "servicequotas":
            return self._list_quotas(json.loads(body))
        if service not in self.upstreams:
            return _refusal(service, "UnknownEndpoint", f"there is no {service} here", 404)
        answer = await self._forward(self.upstreams[service], request, body)
        if service == "s3" and answer.status == 404 and request.method in ("GET", "HEAD"):
            bucket = Access("s3:ListBucket", f"arn:aws:s3:::{request.path.split('/')[1]}")
            if not allowed(statements, bucket):
                return _refusal(service, "AccessDenied", "Access Denied")
        return answer

    def _list_quotas(self, asked: Mapping[str, Any]) -> web.Response:
        start = int(asked.get("NextToken", 0))
        found = [{"QuotaCode": code, "Value": value} for code, value in self.quotas.items()][start : start + 2]
        more = {"NextToken": str(start + 2)} if start + 2 < len(self.quotas) else {}
        return web.json_response({"Quotas": found, **more})

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.clock_ahead_s)

    def _region_of(self, request: web.Request) -> str:
        return self.bucket_regions.get(request.path.split("/")[1], self._region)

    def _is_skewed(self, request: web.Request, service: str) -> bool:
        signed = request.headers.get("X-Amz-Date") or request.query.get("X-Amz-Date")
        if signed is None:
            return False
        at = datetime.strptime(signed, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return abs(self._now() - at) > timedelta(minutes=15 if service == "s3" else 5)

    def _simulate(self, body: bytes) -> web.Response:
        asked = parse_qs(body.decode())
        actions = [values[0] for name, values in asked.items() if name.startswith("ActionNames.member")]
        resources = [values[0] for name, values in asked.items() if name.startswith("ResourceArns.member")]
        entry = "ContextEntries.member.{}.{}".format
        context = {
            asked[entry(i, "ContextKeyName")][0]: asked[entry(i, "ContextKeyValues.member.1")][0]
            for i in range(1, 1 + sum(name.endswith("ContextKeyName") for name in asked))
        }
        statements = self.principals.get(asked["PolicySourceArn"][0].rpartition("/")[2], ())
        results = "".join(
            f"<member><EvalActionName>{action}</EvalActionName><EvalDecision>{max(decided)}</EvalDecision>"
            + "<ResourceSpecificResults>"
            + "".join(
                f"<member><EvalResourceName>{resource}</EvalResourceName>"
                f"<EvalResourceDecision>{one}</EvalResourceDecision></member>"
                for resource, one in zip(resources, decided, strict=True)
            )
            + "</ResourceSpecificResults></member>"
            for action in actions
            for decided in [[decision(statements, Access(action, resource, context)) for resource in resources]]
        )
        return _xml(
            "SimulatePrincipalPolicy",
            f"<IsTruncated>false</IsTruncated><EvaluationResults>{results}</EvaluationResults>",
        )

    def _accesses(self, service: str, request: web.Request, body: bytes) -> list[Access]:
        """Return the accesses that AWS checks before it executes the call."""
        match service:
            case "s3" if "delete" in request.query:
                keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
                return [Access("s3:DeleteObject", f"arn:aws:s3:::{request.path.strip('/')}/{key}") for key in keys]
            case "s3":
                return [self._s3(request)]
            case "cloudformation":
                asked = parse_qs(body.decode())
                stack = f"arn:aws:cloudformation:{self._region}:{self._account}:stack/{asked['StackName'][0]}/id"
                return [Access(f"{service}:{asked['Action'][0]}", stack)]
            case "sqs":
                return [self._sqs(request, json.loads(body))]
            case "bedrock-agentcore":
                return self._agentcore(request, body)
            case "servicequotas":
                return [Access(f"{service}:{request.headers['X-Amz-Target'].rpartition('.')[2]}", "*")]
            case "codebuild":
                return self._codebuild(request.headers["X-Amz-Target"].rpartition(".")[2], json.loads(body))
            case "ecr":
                operation, name = (
                    request.headers["X-Amz-Target"].rpartition(".")[2],
                    json.loads(body)["repositoryName"],
                )
                return [Access(f"ecr:{operation}", f"arn:aws:ecr:{self._region}:{self._account}:repository/{name}")]
            case "logs":
                asked = json.loads(body)
                place = f"log-group:{asked['logGroupName']}:log-stream:{asked['logStreamName']}"
                return [Access("logs:GetLogEvents", f"arn:aws:logs:{self._region}:{self._account}:{place}")]
            case "iam":
                asked = parse_qs(body.decode())
                return [Access(f"iam:{asked['Action'][0]}", asked["PolicySourceArn"][0])]
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
        asked = next((action for name, action in _OF_A_BUCKET.items() if name in request.query), "s3:ListBucket")
        return Access(asked if listing else "s3:Unknown", f"arn:aws:s3:::{bucket}", context)

    def _sqs(self, request: web.Request, asked: Mapping[str, Any]) -> Access:
        operation = request.headers["X-Amz-Target"].rpartition(".")[2]
        if operation == "ListQueues":
            return Access("sqs:ListQueues", "*")
        queue = asked.get("QueueName") or asked["QueueUrl"].rpartition("/")[2]
        return Access(
            f"sqs:{_BATCHES.get(operation, operation)}", f"arn:aws:sqs:{self._region}:{self._account}:{queue}"
        )

    def _codebuild(self, operation: str, asked: Mapping[str, Any]) -> list[Access]:
        builds = [asked["id"]] if "id" in asked else asked.get("ids", ())
        named = asked.get("names") or [asked.get("name") or asked.get("projectName")]
        names = [build.partition(":")[0] for build in builds] or named
        project = f"arn:aws:codebuild:{self._region}:{self._account}:project"
        found = [Access(f"codebuild:{operation}", f"{project}/{name}") for name in names]
        if role := asked.get("serviceRole"):
            found.append(Access("iam:PassRole", role, {"iam:PassedToService": "codebuild.amazonaws.com"}))
        return found

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
                return [*made, *_of_creation(json.loads(body), root)] if request.method == "PUT" else made
            case [tagged] if request.path.startswith("/tags/"):
                tagging = {"GET": "ListTagsForResource", "POST": "TagResource", "DELETE": "UntagResource"}
                return [Access(f"{service}:{tagging[request.method]}", tagged)]
            case [runtime]:
                found = [Access(f"{service}:{_VERBS[request.method]}AgentRuntime", f"{root}/{runtime}")]
                if request.method == "DELETE":
                    found.append(Access(f"{service}:DeleteWorkloadIdentity", _identity(root, runtime)))
                return found
            case [runtime, "runtime-endpoints"]:
                action = "CreateAgentRuntimeEndpoint" if request.method == "PUT" else "ListAgentRuntimeEndpoints"
                return [Access(f"{service}:{action}", f"{root}/{runtime}")]
            case [runtime, "runtime-endpoints", name]:
                resources = (f"{root}/{runtime}", f"{root}/{runtime}/runtime-endpoint/{name}")
                action = f"{_VERBS[request.method]}AgentRuntimeEndpoint"
                return [Access(f"{service}:{action}", resource) for resource in resources]
        return [Access(f"{service}:Unknown", request.path)]


def _of_creation(asked: Mapping[str, Any], root: str) -> list[Access]:
    """Return the accesses to what AgentCore creates and reads along with a runtime."""
    runtime, service = f"{asked['agentRuntimeName']}-0123456789", "bedrock-agentcore"
    found = [
        Access("iam:PassRole", asked["roleArn"], {"iam:PassedToService": f"{service}.amazonaws.com"}),
        Access(f"{service}:CreateAgentRuntimeEndpoint", f"{root}/{runtime}"),
        Access(f"{service}:CreateWorkloadIdentity", _identity(root, runtime)),
    ]
    if asked.get("tags"):
        found.append(Access(f"{service}:TagResource", f"{root}/{runtime}"))
    if code := asked["agentRuntimeArtifact"].get("codeConfiguration"):
        place = code["code"]["s3"]
        found.append(Access("s3:GetObject", f"arn:aws:s3:::{place['bucket']}/{place['prefix']}"))
    return found


def _identity(root: str, runtime: str) -> str:
    return f"{root.removesuffix('runtime')}workload-identity-directory/default/workload-identity/{runtime}"


def _refusal(service: str, code: str, message: str, status: int = 403) -> web.Response:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if service in ("s3", "iam", "sts"):
        text = error if service == "s3" else f"<ErrorResponse>{error}</ErrorResponse>"
        return web.Response(status=status, text=f"<?xml version='1.0'?>{text}", content_type="application/xml")
    return web.Response(
        status=status,
        text=json.dumps({"__type": f"com.amazon.coral.service#{code}", "message": message}),
        headers={"x-amzn-errortype": code, "x-amzn-query-error": f"{code.removesuffix('Exception')};Sender"},
        content_type="application/json",
    )


def _named(arn: str, account: str) -> web.Response:
    return _xml("GetCallerIdentity", f"<Arn>{arn}</Arn><UserId>A:session</UserId><Account>{account}</Account>")


def _xml(operation: str, result: str) -> web.Response:
    text = f"<{operation}Response><{operation}Result>{result}</{operation}Result></{operation}Response>"
    return web.Response(text=text, content_type="text/xml")
