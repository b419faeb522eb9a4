"""An emulator of the control plane of AWS Bedrock AgentCore Runtime, which creates runtimes from images.

An image is a name in ECR's form, mapped to a command on this machine. A runtime passes through the service's states,
its endpoint DEFAULT changes a little later, and refusals have the service's messages.

Invariants:

- A version goes live once it is ready. A version that failed never goes live.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_backend.local.session_pool import ServiceError

_NAME = r"[a-zA-Z][a-zA-Z0-9_]{0,47}"
_IMAGE = r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com/[a-z0-9._/-]+(?::[^:@]{1,300})?(?:@.+)?"
_DEFINITION = (
    "description",
    "agentRuntimeArtifact",
    "roleArn",
    "networkConfiguration",
    "protocolConfiguration",
    "lifecycleConfiguration",
    "environmentVariables",
    "metadataConfiguration",
)
_TRANSITIONS = ("CREATING", "UPDATING", "DELETING")


@dataclass
class RuntimeRecord:
    """One runtime. `definition` belongs to its newest version; `live` is the version that its endpoint serves."""

    arn: str
    definition: dict[str, Any]
    status: str = "CREATING"
    version: int = 1
    live: int | None = None
    live_definition: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    made: str = field(default_factory=lambda: _now())
    changed: str = field(default_factory=lambda: _now())

    @property
    def id(self) -> str:
        return self.arn.rsplit("/", 1)[1]

    @property
    def name(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def image(self) -> str:
        return str(self.definition["agentRuntimeArtifact"]["containerConfiguration"]["containerUri"])

    def go_live(self) -> None:
        self.live, self.live_definition = self.version, self.definition


class ControlPlane:
    """All runtimes. Calls `on_live` with each version that goes live, and `on_gone` with each deleted runtime."""

    def __init__(
        self,
        *,
        region: str,
        images: Mapping[str, object],
        role: str,
        transition_s: float,
        new_ones_require_mmdsv2: bool,
        failing_deletions: int,
        on_live: Callable[[RuntimeRecord], None],
        on_gone: Callable[[RuntimeRecord], Awaitable[None]],
    ) -> None:
        self.runtimes: dict[str, RuntimeRecord] = {}  # by ARN
        self._region = region
        self._images = images
        self._role = role
        self._transition_s = transition_s
        self._new_ones_require_mmdsv2 = new_ones_require_mmdsv2
        self._failing_deletions = failing_deletions
        self._on_live = on_live
        self._on_gone = on_gone
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
            Route(endpoints + "{name}/", self._get_endpoint, methods=["GET"]),
        ]

    def add(self, arn: str, definition: dict[str, Any]) -> RuntimeRecord:
        """Add a runtime that is ready from the start."""
        record = self.runtimes[arn] = RuntimeRecord(arn, definition, status="READY")
        record.go_live()
        return record

    async def close(self) -> None:
        for task in self._changing:
            task.cancel()
        await asyncio.gather(*self._changing, return_exceptions=True)

    # --- the calls ----------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        asked = await _body(request)
        name = asked.get("agentRuntimeName", "")
        if not re.fullmatch(_NAME, name):
            raise ServiceError("ValidationException", f"agentRuntimeName {name!r} does not match {_NAME}")
        definition = self._checked(asked)
        if any(record.name == name for record in self.runtimes.values()):
            raise ServiceError("ConflictException", f"An agent with the name {name} already exists in your account")
        if self._new_ones_require_mmdsv2:
            definition["metadataConfiguration"] = {"requireMMDSV2": True}
        letters = string.ascii_letters + string.digits
        suffix = "".join(secrets.choice(letters) for _ in range(10))
        arn = f"arn:aws:bedrock-agentcore:{self._region}:000000000000:runtime/{name}-{suffix}"
        record = self.runtimes[arn] = RuntimeRecord(arn, definition)
        self._begin(self._become_ready(record, "CREATE_FAILED"))
        return JSONResponse(_brief(record), 202)

    async def _update(self, request: Request) -> Response:
        record = self._named(request)
        definition = self._checked(await _body(request))
        if record.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Agent {record.id} is {record.status}")
        record.definition, record.version = definition, record.version + 1
        record.status, record.changed = "UPDATING", _now()
        self._begin(self._become_ready(record, "UPDATE_FAILED"))
        return JSONResponse(_brief(record), 202)

    async def _delete(self, request: Request) -> Response:
        record = self._named(request)
        if record.status in _TRANSITIONS:
            raise ServiceError("ConflictException", f"Agent {record.id} is {record.status}")
        record.status = "DELETING"
        self._begin(self._be_deleted(record))
        return JSONResponse({"agentRuntimeId": record.id, "status": record.status}, 202)

    async def _list(self, request: Request) -> Response:
        size = int(request.query_params.get("maxResults", "100"))
        start = int(request.query_params.get("nextToken", "0"))
        page = list(self.runtimes.values())[start : start + size]
        more = {"nextToken": str(start + size)} if start + size < len(self.runtimes) else {}
        found = [_brief(record) | {"agentRuntimeName": record.name, "description": ""} for record in page]
        return JSONResponse({"agentRuntimes": found, **more})

    async def _get(self, request: Request) -> Response:
        record = self._named(request)
        why = {"failureReason": record.why} if record.why else {}
        return JSONResponse({**record.definition, **_brief(record), "agentRuntimeName": record.name, **why})

    async def _list_endpoints(self, request: Request) -> Response:
        return JSONResponse({"runtimeEndpoints": [_endpoint(self._named(request))]})

    async def _get_endpoint(self, request: Request) -> Response:
        record = self._named(request)
        if request.path_params["name"] != "DEFAULT":
            raise ServiceError("ResourceNotFoundException", f"No endpoint {request.path_params['name']}")
        return JSONResponse(_endpoint(record))

    # --- transitions --------------------------------------------------------------------------------------

    def _begin(self, change: Any) -> None:
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def _become_ready(self, record: RuntimeRecord, failed: str) -> None:
        await asyncio.sleep(self._transition_s)
        record.changed = _now()
        if record.image not in self._images:
            record.why = f"The specified image identifier does not exist: {record.image}"
            record.status = failed
            return
        record.why, record.status = "", "READY"
        await asyncio.sleep(self._transition_s / 2)  # the endpoint changes later
        record.go_live()
        self._on_live(record)

    async def _be_deleted(self, record: RuntimeRecord) -> None:
        await asyncio.sleep(self._transition_s)
        if self._failing_deletions:
            self._failing_deletions -= 1
            record.status, record.why = "DELETE_FAILED", "The network interfaces could not be released"
            return
        del self.runtimes[record.arn]
        await self._on_gone(record)

    def _named(self, request: Request) -> RuntimeRecord:
        check_signed(request)
        wanted = request.path_params["runtime_id"]
        for record in self.runtimes.values():
            if record.id == wanted:
                return record
        raise ServiceError("ResourceNotFoundException", f"Agent '{wanted}' was not found")

    def _checked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the definition with the service's defaults. Raise ServiceError if the service would refuse it."""
        image = asked.get("agentRuntimeArtifact", {}).get("containerConfiguration", {}).get("containerUri", "")
        if not re.fullmatch(_IMAGE, image):
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
        lifetimes = {"idleRuntimeSessionTimeout": 900, "maxLifetime": 28800} | asked.get("lifecycleConfiguration", {})
        if any(not 60 <= seconds <= 28800 for seconds in lifetimes.values()):
            raise ServiceError("ValidationException", f"lifecycleConfiguration {lifetimes} is out of 60 to 28800")
        given = {key: asked[key] for key in _DEFINITION if key in asked}
        return given | {"lifecycleConfiguration": lifetimes}


def _brief(record: RuntimeRecord) -> dict[str, Any]:
    return {
        "agentRuntimeArn": record.arn,
        "agentRuntimeId": record.id,
        "agentRuntimeVersion": str(record.version),
        "createdAt": record.made,
        "lastUpdatedAt": record.changed,
        "status": record.status,
    }


def _endpoint(record: RuntimeRecord) -> dict[str, Any]:
    behind = record.live != record.version and not record.status.endswith("_FAILED")
    return {
        "name": "DEFAULT",
        "id": "DEFAULT-0123456789",
        "agentRuntimeArn": record.arn,
        "agentRuntimeEndpointArn": f"{record.arn}/runtime-endpoint/DEFAULT",
        "status": ("CREATING" if record.live is None else "UPDATING") if behind else "READY",
        "targetVersion": str(record.version),
        **({"liveVersion": str(record.live)} if record.live is not None else {}),
        "createdAt": record.made,
        "lastUpdatedAt": record.changed,
    }


def check_signed(request: Request) -> None:
    if not request.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256 "):
        raise ServiceError("MissingAuthenticationTokenException", "The request carries no SigV4 signature")


async def _body(request: Request) -> dict[str, Any]:
    check_signed(request)
    try:
        return dict(json.loads(await request.body()))
    except (ValueError, TypeError):
        raise ServiceError("ValidationException", "the body is not a JSON object") from None


def _now() -> str:
    return datetime.now(UTC).isoformat()
