"""Emulate the control plane of AWS Bedrock AgentCore Runtime: runtimes from images and from code.

An image is a name in ECR's format, mapped to a local command. Code is a zip in the local S3. A runtime passes
through the service's states, its endpoint DEFAULT changes a little later, and refusals have the service's messages.
If `ControlLimits` says so, a new runtime is not found at first, and calls are throttled.

Invariants:

- An update replaces the whole definition: omitted fields return to the service's defaults.
- A version goes live at the endpoint DEFAULT once it is ready. A failed version never goes live.
- A named endpoint serves only the version to which it was set. A runtime with a named endpoint cannot be deleted.
"""

import asyncio
import json
import re
import secrets
import string
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_backend.base.local_keys import names_key
from rollout_backend.run.dispatch.rate_limiter import TokenBucket
from rollout_backend.workbench.local.code_artifacts import BuildFailed, CodeStore
from rollout_backend.workbench.local.session_pool import ServiceError

_NAME = r"[a-zA-Z][a-zA-Z0-9_]{0,47}"
_IMAGE = (
    r"(?:\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com|public\.ecr\.aws)"
    r"/[a-z0-9._/-]+(?::[^:@]{1,300})?(?:@.+)?"
)
# Do not reuse the list in the runtime's code: a field that is missing there must be kept here.
_DEFINITION = (
    "description",
    "agentRuntimeArtifact",
    "roleArn",
    "networkConfiguration",
    "protocolConfiguration",
    "lifecycleConfiguration",
    "environmentVariables",
    "authorizerConfiguration",
    "requestHeaderConfiguration",
    "hooksConfiguration",
    "filesystemConfigurations",
    "capacityProviderConfiguration",
    "platformVersion",
    "allowedPorts",
    "resourceConfigurations",
)
# Maximum lifetimes of a session on a microVM and on an instance.
_MICROVM_S, _INSTANCE_S = 28_800, 1_209_600
_MAX_ENDPOINTS, _MAX_TAGS = 10, 50
# Every runtime has this endpoint.
_DEFAULT = "DEFAULT"
_TRANSITIONS = ("CREATING", "UPDATING", "DELETING")


class ControlLimits(BaseModel, frozen=True, extra="forbid"):
    """Limits and delays of the control plane's calls."""

    transition_s: float = Field(default=0.2, ge=0)
    """Time for which a runtime is CREATING, UPDATING or DELETING. Its endpoint changes half that time later."""
    snapshot_s: float = Field(default=0.0, ge=0)
    """Additional time for which a version on platform V2 is CREATING or UPDATING. AgentCore has taken 210 s."""
    zones: Mapping[str, str] | None = None
    """Id of the availability zone of each subnet that exists. None: every subnet exists, in a zone of AgentCore's."""
    supported_zones: frozenset[str] = frozenset({"use1-az1", "use1-az2", "use1-az4"})
    """Ids of the zones in which AgentCore runs sessions."""
    x86_images: frozenset[str] = frozenset()
    """Images that are not built for arm64."""
    invisible_s: float = Field(default=0.0, ge=0)
    """Time for which a new runtime is neither listed nor found."""
    calls_per_s: float | None = Field(default=None, gt=0)
    """Rate of all calls together. None: no throttling."""
    max_runtimes: int = Field(default=1000, ge=1)
    new_runtimes_require_mmdsv2: bool = False
    """False: a runtime must be updated once before it can be invoked, as in some AWS accounts."""
    failing_deletions: int = Field(default=0, ge=0)
    """Number of first deletions that end as DELETE_FAILED."""
    keeps_runtimes_with_sessions: bool = False
    """Whether a runtime with open sessions cannot be deleted. False: the deletion ends them."""


@dataclass
class EndpointRecord:
    """An endpoint. `target` is the version that it is set to, `live` the version that it serves."""

    name: str
    target: int
    status: str = "CREATING"
    live: int | None = None
    made: str = field(default_factory=lambda: _now())


@dataclass
class RuntimeRecord:
    """One runtime. `definition` belongs to its newest version."""

    arn: str
    definition: dict[str, Any]
    tags: dict[str, str] = field(default_factory=dict)
    visible_at: float = 0.0
    """Time on the monotonic clock from which the runtime is listed and found."""
    status: str = "CREATING"
    version: int = 1
    versions: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Definition of each version that became ready."""
    endpoints: dict[str, EndpointRecord] = field(default_factory=lambda: {_DEFAULT: EndpointRecord(_DEFAULT, 1)})
    why: str = ""
    made: str = field(default_factory=lambda: _now())
    changed: str = field(default_factory=lambda: _now())

    @property
    def id(self) -> str:
        return self.arn.rsplit("/", 1)[1]

    @property
    def name(self) -> str:
        return self.id.rpartition("-")[0]

    def be_ready(self) -> None:
        self.why, self.status = "", "READY"
        self.versions[self.version] = self.definition

    def go_live(self, version: int) -> None:
        """Let the endpoint DEFAULT serve a version."""
        default = self.endpoints[_DEFAULT]
        default.live, default.status = version, "READY" if default.target == version else "UPDATING"

    def served(self, name: str) -> dict[str, Any] | None:
        """Return the definition that an endpoint serves, or None."""
        endpoint = self.endpoints.get(name)
        return self.versions[endpoint.live] if endpoint is not None and endpoint.live is not None else None


class ControlPlane:
    """Manages all runtimes. Calls `on_live` with each runtime and endpoint whose version goes live, and `on_gone`
    with each deleted runtime."""

    def __init__(
        self,
        *,
        region: str,
        images: Mapping[str, object],
        code: CodeStore,
        role: str,
        access_key: str,
        limits: ControlLimits,
        on_live: Callable[[RuntimeRecord, str], Awaitable[None]],
        on_gone: Callable[[RuntimeRecord, str], Awaitable[None]],
        sessions_of: Callable[[str], int],
    ) -> None:
        """`sessions_of` returns the number of open sessions of the runtime with an ARN."""
        # The keys are ARNs.
        self.runtimes: dict[str, RuntimeRecord] = {}
        self._region = region
        self._images = images
        self._code = code
        self._role = role
        self._access_key = access_key
        self._limits = limits
        self._calls = TokenBucket(limits.calls_per_s) if limits.calls_per_s else None
        self._failing_deletions = limits.failing_deletions
        self._on_live = on_live
        self._on_gone = on_gone
        self._sessions_of = sessions_of
        self._changing: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        runtime, endpoints = "/runtimes/{runtime_id}/", "/runtimes/{runtime_id}/runtime-endpoints/"
        return [
            Route("/runtimes/", self._create, methods=["PUT"]),
            Route("/runtimes/", self._list, methods=["POST"]),
            Route(runtime, self._get, methods=["GET"]),
            Route(runtime, self._update, methods=["PUT"]),
            Route(runtime, self._delete, methods=["DELETE"]),
            Route(endpoints, self._list_endpoints, methods=["POST"]),
            Route(endpoints, self._create_endpoint, methods=["PUT"]),
            Route(endpoints + "{name}/", self._get_endpoint, methods=["GET"]),
            Route(endpoints + "{name}/", self._update_endpoint, methods=["PUT"]),
            Route(endpoints + "{name}/", self._delete_endpoint, methods=["DELETE"]),
            Route("/tags/{arn:path}", self._tags, methods=["GET", "POST", "DELETE"]),
        ]

    def add(self, arn: str, definition: dict[str, Any]) -> RuntimeRecord:
        """Add a runtime that is ready from the start."""
        record = self.runtimes[arn] = RuntimeRecord(arn, definition)
        record.be_ready()
        record.go_live(record.version)
        return record

    async def close(self) -> None:
        for task in self._changing:
            task.cancel()
        await asyncio.gather(*self._changing, return_exceptions=True)

    # --- the calls ----------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        asked = await self._body(request)
        name = asked.get("agentRuntimeName", "")
        if not re.fullmatch(_NAME, name):
            raise ServiceError("ValidationException", f"agentRuntimeName {name!r} does not match {_NAME}")
        definition = self._checked(asked)
        if any(record.name == name for record in self.runtimes.values()):
            raise ServiceError("ConflictException", f"An agent with the name {name} already exists in your account")
        if len(self.runtimes) >= self._limits.max_runtimes:
            raise ServiceError("ServiceQuotaExceededException", f"You have {len(self.runtimes)} agents, the maximum")
        if self._limits.new_runtimes_require_mmdsv2:
            definition["metadataConfiguration"] = {"requireMMDSV2": True}
        letters = string.ascii_letters + string.digits
        suffix = "".join(secrets.choice(letters) for _ in range(10))
        arn = f"arn:aws:bedrock-agentcore:{self._region}:000000000000:runtime/{name}-{suffix}"
        visible_at = time.monotonic() + self._limits.invisible_s
        record = self.runtimes[arn] = RuntimeRecord(arn, definition, asked.get("tags", {}), visible_at)
        self._begin(self._become_ready(record, "CREATE_FAILED"))
        return JSONResponse(_brief(record), 202)

    async def _update(self, request: Request) -> Response:
        asked = await self._body(request)
        definition = self._checked(asked)
        # AgentCore ignores this field when it creates a runtime.
        if "metadataConfiguration" in asked:
            definition["metadataConfiguration"] = asked["metadataConfiguration"]
        record = self._named(request)
        if record.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Agent {record.id} is {record.status}")
        if (record.definition.get("platformVersion"), definition["platformVersion"]) == ("V2", "V1"):
            raise ServiceError("ValidationException", f"Agent {record.id} cannot move from platform V2 to V1")
        record.definition, record.version = definition, record.version + 1
        record.status, record.changed = "UPDATING", _now()
        default = record.endpoints[_DEFAULT]
        default.target, default.status = record.version, "CREATING" if default.live is None else "UPDATING"
        self._begin(self._become_ready(record, "UPDATE_FAILED"))
        return JSONResponse(_brief(record), 202)

    async def _delete(self, request: Request) -> Response:
        record = self._named(request)
        if record.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Agent {record.id} is {record.status}")
        if named := sorted(record.endpoints.keys() - {_DEFAULT}):
            raise ServiceError("ConflictException", f"Agent {record.id} has endpoints {named}")
        if self._limits.keeps_runtimes_with_sessions and self._sessions_of(record.arn):
            raise ServiceError("ConflictException", f"Agent {record.id} has open sessions")
        record.status = "DELETING"
        self._begin(self._be_deleted(record))
        return JSONResponse({"agentRuntimeId": record.id, "status": record.status}, 202)

    async def _list(self, request: Request) -> Response:
        self._admit(request)
        size = int(request.query_params.get("maxResults", "100"))
        start = int(request.query_params.get("nextToken", "0"))
        visible = [record for record in self.runtimes.values() if _is_visible(record)]
        page = visible[start : start + size]
        more = {"nextToken": str(start + size)} if start + size < len(visible) else {}
        found = [_brief(record) | {"agentRuntimeName": record.name, "description": ""} for record in page]
        return JSONResponse({"agentRuntimes": found, **more})

    async def _get(self, request: Request) -> Response:
        record = self._named(request)
        if version := request.query_params.get("version"):
            if int(version) not in record.versions:
                raise ServiceError("ResourceNotFoundException", f"Agent {record.id} has no version {version}")
            older = {**_brief(record), "agentRuntimeVersion": version, "status": "READY"}
            return JSONResponse({**record.versions[int(version)], **older, "agentRuntimeName": record.name})
        why = {"failureReason": record.why} if record.why else {}
        return JSONResponse({**record.definition, **_brief(record), "agentRuntimeName": record.name, **why})

    async def _list_endpoints(self, request: Request) -> Response:
        record = self._named(request)
        return JSONResponse({"runtimeEndpoints": [_endpoint(record, each) for each in record.endpoints.values()]})

    async def _get_endpoint(self, request: Request) -> Response:
        record = self._named(request)
        return JSONResponse(_endpoint(record, self._endpoint_of(record, request)))

    async def _create_endpoint(self, request: Request) -> Response:
        asked = await self._body(request)
        record, name = self._named(request), asked.get("name", "")
        if not re.fullmatch(_NAME, name):
            raise ServiceError("ValidationException", f"name {name!r} does not match {_NAME}")
        if name in record.endpoints:
            raise ServiceError("ConflictException", f"An endpoint with the name {name} already exists")
        if len(record.endpoints) >= _MAX_ENDPOINTS:
            raise ServiceError("ServiceQuotaExceededException", f"Agent {record.id} has {_MAX_ENDPOINTS} endpoints")
        endpoint = EndpointRecord(name, self._version(record, asked))
        record.endpoints[name] = endpoint
        self._begin(self._serve_endpoint(record, endpoint))
        return JSONResponse(_endpoint(record, endpoint), 202)

    async def _update_endpoint(self, request: Request) -> Response:
        asked = await self._body(request)
        record = self._named(request)
        endpoint = self._endpoint_of(record, request)
        if endpoint.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Endpoint {endpoint.name} is {endpoint.status}")
        endpoint.target, endpoint.status = self._version(record, asked), "UPDATING"
        self._begin(self._serve_endpoint(record, endpoint))
        return JSONResponse(_endpoint(record, endpoint), 202)

    async def _delete_endpoint(self, request: Request) -> Response:
        record = self._named(request)
        endpoint = self._endpoint_of(record, request)
        if endpoint.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Endpoint {endpoint.name} is {endpoint.status}")
        endpoint.status = "DELETING"
        self._begin(self._end_endpoint(record, endpoint))
        return JSONResponse({"status": endpoint.status}, 202)

    def _endpoint_of(self, record: RuntimeRecord, request: Request) -> EndpointRecord:
        name = request.path_params["name"]
        if name not in record.endpoints or (name == _DEFAULT and request.method != "GET"):
            raise ServiceError("ResourceNotFoundException", f"No endpoint {name}")
        return record.endpoints[name]

    def _version(self, record: RuntimeRecord, asked: Mapping[str, Any]) -> int:
        """Return the version that an endpoint is set to; the default is the newest."""
        version = int(asked.get("agentRuntimeVersion", record.version))
        if record.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Agent {record.id} is {record.status}")
        if version not in record.versions:
            raise ServiceError("ValidationException", f"Agent {record.id} has no version {version} that is ready")
        return version

    async def _tags(self, request: Request) -> Response:
        """List, add or remove tags of a runtime."""
        added = (await self._body(request))["tags"] if request.method == "POST" else {}
        if request.method != "POST":
            self._admit(request)
        record = self.runtimes.get(request.path_params["arn"])
        if record is None or not _is_visible(record):
            raise ServiceError("ResourceNotFoundException", f"{request.path_params['arn']} was not found")
        if request.method == "GET":
            return JSONResponse({"tags": record.tags})
        tags = {**record.tags, **added}
        for key in request.query_params.getlist("tagKeys"):
            tags.pop(key, None)
        if len(tags) > _MAX_TAGS:
            raise ServiceError(
                "ServiceQuotaExceededException", f"{record.arn} would have {len(tags)} tags, and may have 50"
            )
        record.tags = tags
        return Response(status_code=204)

    # --- transitions --------------------------------------------------------------------------------------

    def _begin(self, change: Any) -> None:
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def _become_ready(self, record: RuntimeRecord, failed: str) -> None:
        slower_s = self._limits.snapshot_s if record.definition.get("platformVersion") == "V2" else 0.0
        await asyncio.sleep(self._limits.transition_s + slower_s)
        record.changed = _now()
        artifact = record.definition["agentRuntimeArtifact"]
        try:
            if code := artifact.get("codeConfiguration"):
                await self._code.install(code)
            elif (image := artifact["containerConfiguration"]["containerUri"]) not in self._images:
                raise BuildFailed(f"The specified image identifier does not exist: {image}")
            elif image in self._limits.x86_images and "capacityProviderConfiguration" not in record.definition:
                raise BuildFailed(f"Architecture incompatible for uri '{image}'. Supported architectures: [arm64]")
        except BuildFailed as error:
            record.why, record.status = str(error), failed
            record.endpoints[_DEFAULT].status = "READY"
            return
        record.be_ready()
        version = record.version
        # The endpoint changes later than the runtime.
        await asyncio.sleep(self._limits.transition_s / 2)
        record.go_live(version)
        await self._on_live(record, _DEFAULT)

    async def _serve_endpoint(self, record: RuntimeRecord, endpoint: EndpointRecord) -> None:
        await asyncio.sleep(self._limits.transition_s)
        endpoint.live, endpoint.status = endpoint.target, "READY"
        await self._on_live(record, endpoint.name)

    async def _end_endpoint(self, record: RuntimeRecord, endpoint: EndpointRecord) -> None:
        await asyncio.sleep(self._limits.transition_s)
        del record.endpoints[endpoint.name]
        await self._on_gone(record, endpoint.name)

    async def _be_deleted(self, record: RuntimeRecord) -> None:
        await asyncio.sleep(self._limits.transition_s)
        if self._failing_deletions:
            self._failing_deletions -= 1
            record.status, record.why = "DELETE_FAILED", "The network interfaces could not be released"
            return
        del self.runtimes[record.arn]
        await self._on_gone(record, _DEFAULT)

    def _admit(self, request: Request) -> None:
        check_signed(request, self._access_key)
        if self._calls is not None and not self._calls.try_take(time.monotonic()):
            raise ServiceError("ThrottlingException", "Rate exceeded")

    async def _body(self, request: Request) -> dict[str, Any]:
        self._admit(request)
        try:
            return dict(json.loads(await request.body()))
        except (ValueError, TypeError):
            raise ServiceError("ValidationException", "the body is not a JSON object") from None

    def _named(self, request: Request) -> RuntimeRecord:
        # `_body` has already admitted a PUT.
        if request.method != "PUT":
            self._admit(request)
        wanted = request.path_params["runtime_id"]
        for record in self.runtimes.values():
            if record.id == wanted and _is_visible(record):
                return record
        raise ServiceError("ResourceNotFoundException", f"Agent '{wanted}' was not found")

    def _checked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the definition with the service's defaults. Raises ServiceError if the service would refuse it."""
        artifact = asked.get("agentRuntimeArtifact", {})
        image = artifact.get("containerConfiguration", {}).get("containerUri", "")
        if len(artifact) != 1:
            raise ServiceError("ValidationException", "agentRuntimeArtifact needs exactly one kind of artifact")
        if "codeConfiguration" in artifact:
            self._code.check(artifact["codeConfiguration"])
        elif not re.fullmatch(_IMAGE, image):
            raise ServiceError("ValidationException", f"containerUri {image!r} does not match {_IMAGE}")
        if (role := asked.get("roleArn", "")) != self._role:
            raise ServiceError(
                "ValidationException",
                f"Role validation failed for '{role}': it must exist, and its trust policy must let this service "
                "assume it",
            )
        network = asked.get("networkConfiguration", {})
        if (network.get("networkMode") == "VPC") != bool(network.get("networkModeConfig")):
            raise ServiceError("ValidationException", "networkModeConfig belongs to networkMode VPC")
        self._check_subnets((network.get("networkModeConfig") or {}).get("subnets", ()))
        on_instances = "capacityProviderConfiguration" in asked
        lifetimes = {"idleRuntimeSessionTimeout": 900, "maxLifetime": 28800} | asked.get("lifecycleConfiguration", {})
        longest = _INSTANCE_S if on_instances else _MICROVM_S
        if any(not 60 <= seconds <= longest for seconds in lifetimes.values()):
            raise ServiceError("ValidationException", f"lifecycleConfiguration {lifetimes} is out of 60 to {longest}")
        platform = asked.get("platformVersion", "V1")
        if platform not in ("V1", "V2"):
            raise ServiceError("ValidationException", f"platformVersion {platform!r} does not exist")
        if "hooksConfiguration" in asked and (platform == "V1" or on_instances):
            raise ServiceError("ValidationException", "hooksConfiguration needs platformVersion V2 and microVMs")
        given = {key: asked[key] for key in _DEFINITION if key in asked}
        return given | {"lifecycleConfiguration": lifetimes, "platformVersion": platform}

    def _check_subnets(self, subnets: Sequence[str]) -> None:
        if (zones := self._limits.zones) is None:
            return
        for subnet in subnets:
            if (zone := zones.get(subnet)) is None:
                raise ServiceError("ValidationException", f"The subnet ID '{subnet}' does not exist")
            if zone not in self._limits.supported_zones:
                raise ServiceError(
                    "ValidationException", f"The subnet {subnet} is in the unsupported availability zone {zone}"
                )


def _brief(record: RuntimeRecord) -> dict[str, Any]:
    return {
        "agentRuntimeArn": record.arn,
        "agentRuntimeId": record.id,
        "agentRuntimeVersion": str(record.version),
        "createdAt": record.made,
        "lastUpdatedAt": record.changed,
        "status": record.status,
    }


def _endpoint(record: RuntimeRecord, endpoint: EndpointRecord) -> dict[str, Any]:
    return {
        "name": endpoint.name,
        # CreateAgentRuntimeEndpoint uses this name.
        "endpointName": endpoint.name,
        "id": f"{endpoint.name}-0123456789",
        "agentRuntimeId": record.id,
        "agentRuntimeArn": record.arn,
        "agentRuntimeEndpointArn": f"{record.arn}/runtime-endpoint/{endpoint.name}",
        "status": endpoint.status,
        "targetVersion": str(endpoint.target),
        **({"liveVersion": str(endpoint.live)} if endpoint.live is not None else {}),
        "createdAt": endpoint.made,
        "lastUpdatedAt": endpoint.made,
    }


def check_signed(request: Request, access_key: str) -> None:
    """Raise ServiceError unless the request is signed, and with this access key if it is not empty."""
    signature = request.headers.get("authorization", "")
    if not signature.startswith("AWS4-HMAC-SHA256 "):
        raise ServiceError("MissingAuthenticationTokenException", "The request carries no SigV4 signature")
    if access_key and not names_key(signature, access_key):
        raise ServiceError("AccessDeniedException", "The request is not signed with this local cloud's key")


def _is_visible(record: RuntimeRecord) -> bool:
    return time.monotonic() >= record.visible_at


def _now() -> str:
    return datetime.now(UTC).isoformat()
