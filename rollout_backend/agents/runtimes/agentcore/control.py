"""Use AgentCore's control plane to create or update the runtime that the settings describe, and to pin its named
endpoints to a version, which later deployments leave alone.

Invariants:

- within `ready_timeout_s`, `make` returns the ARN of a runtime whose endpoint serves the settings, or raises
  PreflightError, even if several processes call it concurrently;
- a runtime that failed earlier is retried; a new failure is reported;
- no runtime gets an image that ECR says is not built for its processors;
- a runtime is deleted only if this backend created it and its creation failed;
- `pin_endpoint` returns once the endpoint serves the version, or raises PreflightError. An endpoint that already
  serves the version is not changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from rollout_backend.agents.runtimes.agentcore.architecture import ask_ecr, describe_unfit
from rollout_backend.agents.runtimes.agentcore.provision import (
    DEFINITION,
    TAG,
    Action,
    CodeArtifact,
    Plan,
    RuntimeSpec,
    plan,
)
from rollout_backend.base import aws
from rollout_backend.errors import PreflightError

ENDPOINT = "DEFAULT"
_PAGE = 100
# The shortest and the longest pause between two polls of a runtime in transition.
_PAUSE_S = (0.2, 5.0)

MADE_BY_RUN: Mapping[str, str] = {TAG: "run"}
# AgentCore throttles its control plane at a few calls per second, for all users of an account together.
_ATTEMPTS = 8
# The pause after each call that reads one of many runtimes.
READ_PAUSE_S = 0.25

_JSON = {"shape": "Json"}
# The fields of a runtime's definition in the newest model of the service. The botocore that aioboto3 pins lacks some
# of them and parts of others, and would drop or refuse those. As JSON, they pass through it unchanged. A response
# passes as a whole, with the fields of a model of next year.
NEWER_FIELDS: Mapping[str, Any] = {
    "shapes": {
        "Json": {"type": "structure", "members": {}, "document": True},
        "CreateAgentRuntimeRequest": {"members": dict.fromkeys(DEFINITION, _JSON)},
        "UpdateAgentRuntimeRequest": {"members": dict.fromkeys([*DEFINITION, "metadataConfiguration"], _JSON)},
        "GetAgentRuntimeResponse": {"document": True},
    }
}


def control_client(region: str, endpoint_url: str | None) -> AbstractAsyncContextManager[Any]:
    """Open a control-plane client that knows the newer fields."""
    return aws.client(
        "bedrock-agentcore-control",
        region=region,
        endpoint_url=endpoint_url,
        retries=_ATTEMPTS - 1,
        newer_fields=NEWER_FIELDS,
    )


async def list_runtimes(client: Any) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the runtimes of the account as ListAgentRuntimes returns them."""
    async for page in client.get_paginator("list_agent_runtimes").paginate(PaginationConfig={"PageSize": _PAGE}):
        for runtime in page["agentRuntimes"]:
            yield runtime


def id_of(arn: str) -> str:
    """Return the id of a runtime, which the control plane takes instead of the ARN."""
    return arn.rpartition("/")[2]


async def find_runtime(client: Any, name: str) -> Mapping[str, Any] | None:
    """Return the entry of ListAgentRuntimes with this name, or None."""
    async for runtime in list_runtimes(client):
        if runtime["agentRuntimeName"] == name:
            return runtime
    return None


class QuotaOfRuntimes(PreflightError):
    """The account has reached its quota of runtimes."""


class RuntimeDelayed(PreflightError):
    """The runtime is not ready yet. A later call may succeed."""


class ReadyRuntime(NamedTuple):
    """A runtime whose endpoint DEFAULT serves the wanted settings."""

    arn: str
    version: int
    """The version that is served."""
    created: bool = False
    """Whether `RuntimeMaker.make` has created the runtime, with the tags."""


class RuntimeMaker:
    """Creates or updates one runtime. `on_status` receives a line for each change."""

    def __init__(
        self,
        wanted: RuntimeSpec,
        client: Any,
        ready_timeout_s: float,
        *,
        tags: Mapping[str, str] = MADE_BY_RUN,
        ecr_url: str | None = None,
        on_status: Callable[[str], object] = lambda text: None,
        find_id: Callable[[str], Awaitable[str | None]] | None = None,
    ) -> None:
        """`find_id` returns the id of the runtime with a given name; the default lists all runtimes on each call.
        `ecr_url` is the endpoint of ECR if not AWS's."""
        self._wanted = wanted
        self._client = client
        self._ready_timeout_s = ready_timeout_s
        self._tags = tags
        self._ecr_url = ecr_url
        self._on_status = on_status
        self._find_id = find_id
        # The id is None until the runtime with that name is known. GetAgentRuntime may return a version older than
        # `_version`, the one we made.
        self._id: str | None = None
        self._version = 0
        self._asked: list[Action] = []

    async def preview(self) -> str:
        """Describe what `make` would do, without changing anything.

        Raises:
            PreflightError: `make` would raise this error.
        """
        described = await self._find()
        found = plan(self._wanted, described)
        name = f"runtime {self._wanted.name}"
        unknown = await self._check_image(found)
        unknown = f"; whether it is built for arm64 is not known ({unknown})" if unknown else ""
        match found.action:
            case Action.CREATE:
                return f"{name}: would be made from {self._wanted.image}{unknown}"
            case Action.REPLACE:
                text = f"{name}: {described['status']}; would be deleted and made again from {self._wanted.image}"
                return text + unknown
            case Action.UPDATE:
                return f"{name}: would be updated ({', '.join(found.differs) or 'its last update failed'})"
            case Action.LEAVE:
                raise self._not_ours(found)
            case _:
                return f"{name}: {'there, and ready' if found.action is Action.READY else described['status']}"

    async def make(self) -> ReadyRuntime:
        """Wait until the runtime exists and is ready. Raises PreflightError."""
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                described = await self._settle()
                version = int(described["agentRuntimeVersion"])
                with self._explained("GetAgentRuntimeEndpoint"):
                    await wait_served(self._client, str(self._id), version)
                return ReadyRuntime(str(described["agentRuntimeArn"]), version, Action.CREATE in self._asked)
        except TimeoutError:
            raise RuntimeDelayed(
                f"runtime {self._wanted.name} was not ready after {self._ready_timeout_s:g} s: look at it in "
                "the AgentCore console, or raise runtime.ready_timeout_s"
            ) from None

    # --- towards what is wanted ---------------------------------------------------------------------------

    async def _settle(self) -> Mapping[str, Any]:
        """Poll the runtime, and change it until it matches the settings."""
        waited, waits = False, pauses()
        while True:
            described = await self._find()
            found = plan(self._wanted, described)
            if described:
                # The description may be older than our last change.
                being_deleted = self._asked[-1:] == [Action.REPLACE] and described["status"] == "CREATE_FAILED"
                if being_deleted or int(described["agentRuntimeVersion"]) < self._version:
                    found = Plan(Action.WAIT)
                elif (self._asked or waited) and described["status"].endswith("_FAILED"):
                    raise self._failed(described)
            elif self._asked[-1:] == [Action.CREATE]:
                found = Plan(Action.WAIT)
            match found.action:
                case Action.READY:
                    return described
                case Action.LEAVE:
                    raise self._not_ours(found)
                case Action.WAIT:
                    waited = True
                case action:
                    if action in self._asked:
                        if found.differs == ("requireMMDSV2",):
                            # The service accepts this setting, but does not return it.
                            return described
                        raise PreflightError(
                            f"runtime {self._wanted.name} is being changed by somebody else at this time "
                            f"({', '.join(found.differs) or 'it was deleted'}): give runs with different settings "
                            "different values of runtime.name"
                        )
                    if await self._act(action, found, described):
                        self._asked.append(action)
                        continue
                    # Another process is changing the runtime; its result is good enough.
                    waited = True
            await asyncio.sleep(next(waits))

    async def _act(self, action: Action, found: Plan, described: Mapping[str, Any]) -> bool:
        """Apply a change. Return False if another process is changing the runtime."""
        wanted = self._wanted
        await self._check_image(found)
        try:
            match action:
                case Action.CREATE:
                    self._on_status(f"making runtime {wanted.name} from {wanted.image}")
                    with self._explained("CreateAgentRuntime"):
                        made = await self._client.create_agent_runtime(
                            agentRuntimeName=wanted.name, tags=self._tags, **wanted.definition()
                        )
                case Action.UPDATE:
                    self._on_status(f"updating runtime {wanted.name} ({', '.join(found.differs)})")
                    with self._explained("UpdateAgentRuntime"):
                        made = await self._client.update_agent_runtime(
                            agentRuntimeId=self._id, **wanted.update_of(described)
                        )
                case _:
                    self._on_status(f"deleting runtime {wanted.name}, which is in a failed state")
                    with self._explained("DeleteAgentRuntime"):
                        await self._client.delete_agent_runtime(agentRuntimeId=self._id)
                    return True
        except (self._client.exceptions.ConflictException, self._client.exceptions.ResourceNotFoundException):
            return False
        self._id, self._version = str(made["agentRuntimeId"]), int(made["agentRuntimeVersion"])
        return True

    async def _check_image(self, found: Plan) -> str:
        """Return why the architecture of the image that a change would bring is not known; empty if it is.

        Raises:
            PreflightError: the image does not run there.
        """
        image = self._wanted.image
        changes = found.action in (Action.CREATE, Action.REPLACE) or "image" in found.differs
        if not changes or isinstance(image, CodeArtifact) or self._wanted.capacity_provider is not None:
            return ""
        built = (await ask_ecr([image], endpoint_url=self._ecr_url))[image]
        if built.is_unfit:
            raise PreflightError(f"runtime {self._wanted.name}: {describe_unfit(image, built)}")
        return built.unknown

    # --- what is there ------------------------------------------------------------------------------------

    async def _find(self) -> Mapping[str, Any]:
        """Describe the runtime with that name; an empty mapping if it does not exist."""
        if self._id is None:
            self._id = await self._id_by_name()
        if self._id is None:
            return {}
        try:
            with self._explained("GetAgentRuntime"):
                described: dict[str, Any] = await self._client.get_agent_runtime(agentRuntimeId=self._id)
        except self._client.exceptions.ResourceNotFoundException:
            if self._asked[-1:] != [Action.CREATE]:
                # A new runtime is not found at first. Any other was deleted in the meantime.
                self._id, self._version = None, 0
            return {}
        return described

    async def _id_by_name(self) -> str | None:
        with self._explained("ListAgentRuntimes"):
            if self._find_id is not None:
                return await self._find_id(self._wanted.name)
            found = await find_runtime(self._client, self._wanted.name)
        return None if found is None else str(found["agentRuntimeId"])

    # --- what goes wrong ----------------------------------------------------------------------------------

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        """Turn errors into PreflightError, except conflicts and missing runtimes, which the caller handles."""
        name = f"runtime {self._wanted.name}"
        try:
            yield
        except ClientError as error:
            match aws.code_of(error):
                case "ConflictException" | "ResourceNotFoundException":
                    raise
                case "AccessDeniedException":
                    raise PreflightError(
                        f"{name}: these credentials may not call {operation} ({aws.message_of(error)}). Deploy the "
                        "stack with RunRuntimes=true and attach its TrainerPolicyArn, or make the runtime yourself "
                        "and set runtime.arn instead of runtime.image"
                    ) from error
                case "ValidationException":
                    raise PreflightError(
                        f"{name}: AgentCore refuses {operation}: {aws.message_of(error)}. Correct runtime.image, "
                        "runtime.role, runtime.subnets, runtime.security_groups, runtime.environment or the other "
                        "settings of the section runtime that describe it"
                    ) from error
                case "ServiceQuotaExceededException" if operation == "CreateAgentRuntime":
                    raise QuotaOfRuntimes(
                        f"{name}: {aws.message_of(error)}. Delete a runtime or have the quota raised, or set "
                        "runtime.arn to one that exists"
                    ) from error
                case _:
                    raise aws.preflight_error(error, name, "runtime.image") from error
        except aws.EXPLAINED as error:
            raise aws.preflight_error(error, name, "runtime.endpoint_url") from error

    def _failed(self, described: Mapping[str, Any]) -> PreflightError:
        why = why_failed(described)
        if described["status"] == "DELETE_FAILED":
            return RuntimeDelayed(
                f"runtime {self._wanted.name} is DELETE_FAILED: {why}. Delete it in the AgentCore console, or set "
                "runtime.name to another name"
            )
        return PreflightError(
            f"runtime {self._wanted.name} is {described['status']}: {why}. Correct the cause and start again: "
            f"runtime.image ({self._wanted.image}) must be there and be built for "
            f"{'the instances' if self._wanted.capacity_provider else 'arm64'}, and runtime.role "
            f"({self._wanted.role}) must trust AgentCore and may pull it"
        )

    def _not_ours(self, found: Plan) -> PreflightError:
        if "platform_version" in found.differs and self._wanted.platform_version == "V1":
            return PreflightError(
                f"runtime {self._wanted.name} is not on platform {self._wanted.platform_version}, and no change "
                "moves it there: set runtime.name to another name, or omit runtime.platform_version"
            )
        return PreflightError(
            f"runtime {self._wanted.name} exists, and differs in {', '.join(found.differs) or 'its status'}; it was "
            "not made by this backend, which leaves it alone: set runtime.name to another name, or set runtime.arn "
            "to use it unchanged"
        )


async def wait_served(client: Any, runtime_id: str, version: int) -> None:
    """Wait until the endpoint DEFAULT serves this version or a newer one. Raises PreflightError on failure."""
    for pause in pauses():
        # The endpoint is created shortly after the runtime.
        endpoint = await _describe_endpoint(client, runtime_id, ENDPOINT)
        if endpoint.get("status") == "READY" and int(endpoint.get("liveVersion", 0)) >= version:
            return
        _raise_if_failed(endpoint, ENDPOINT, runtime_id)
        await asyncio.sleep(pause)


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between polls of a runtime in transition, indefinitely."""
    first, longest = _PAUSE_S
    return (min(longest, first * 1.5 ** min(i, 50)) for i in itertools.count())


async def pin_endpoint(
    client: Any, runtime: ReadyRuntime, name: str, timeout_s: float, on_status: Callable[[str], object]
) -> None:
    """Create or update the endpoint `name`, and wait until it serves the runtime's version.

    Raises:
        PreflightError: AgentCore refused the endpoint, or it did not serve the version in time.
    """
    try:
        with aws.explained(f"endpoint {name} of {runtime.arn}", "runtime.qualifier"):
            async with asyncio.timeout(timeout_s):
                await _pin(client, id_of(runtime.arn), str(runtime.version), name, on_status)
    except TimeoutError:
        raise PreflightError(
            f"endpoint {name} of {runtime.arn} did not serve version {runtime.version} after {timeout_s:g} s: see it "
            "in the AgentCore console, and deploy again"
        ) from None


async def _pin(client: Any, runtime_id: str, version: str, name: str, on_status: Callable[[str], object]) -> None:
    wanted, asked = {"agentRuntimeId": runtime_id, "agentRuntimeVersion": version}, False
    for pause in pauses():
        endpoint = await _describe_endpoint(client, runtime_id, name)
        if endpoint.get("status") == "READY" and endpoint.get("liveVersion") == version:
            return
        if asked:
            _raise_if_failed(endpoint, name, runtime_id)
        elif not endpoint or endpoint["status"].endswith(("READY", "_FAILED")):
            with contextlib.suppress(client.exceptions.ConflictException):
                # The runtime or the endpoint is in transition.
                if endpoint:
                    before = endpoint.get("liveVersion", "none")
                    on_status(f"moving endpoint {name} from version {before} to {version}")
                    await client.update_agent_runtime_endpoint(endpointName=name, **wanted)
                else:
                    on_status(f"making endpoint {name} for version {version}")
                    await client.create_agent_runtime_endpoint(name=name, **wanted)
                asked = True
        await asyncio.sleep(pause)


async def named_endpoints(client: Any, runtime_id: str) -> list[Mapping[str, Any]]:
    """Return a runtime's endpoints except DEFAULT, as ListAgentRuntimeEndpoints returns them."""
    pages = client.get_paginator("list_agent_runtime_endpoints").paginate(agentRuntimeId=runtime_id)
    found = [endpoint async for page in pages for endpoint in page["runtimeEndpoints"]]
    return [endpoint for endpoint in found if endpoint["name"] != ENDPOINT]


async def _describe_endpoint(client: Any, runtime_id: str, name: str) -> Mapping[str, Any]:
    """Return the endpoint; an empty mapping if it does not exist."""
    try:
        return dict(await client.get_agent_runtime_endpoint(agentRuntimeId=runtime_id, endpointName=name))
    except client.exceptions.ResourceNotFoundException:
        return {}


def _raise_if_failed(endpoint: Mapping[str, Any], name: str, runtime_id: str) -> None:
    if endpoint and endpoint["status"].endswith("_FAILED"):
        raise PreflightError(f"endpoint {name} of {runtime_id} is {endpoint['status']}: {why_failed(endpoint)}")


async def delete_runtime(client: Any, runtime_id: str, timeout_s: float) -> str:
    """Delete a runtime, and wait until it is gone. Return why it stays, or an empty string."""
    errors = client.exceptions
    try:
        async with asyncio.timeout(timeout_s):
            await client.delete_agent_runtime(agentRuntimeId=runtime_id)
            for pause in pauses():
                described = await client.get_agent_runtime(agentRuntimeId=runtime_id)
                if described["status"] == "DELETE_FAILED":
                    return f"it is DELETE_FAILED: {why_failed(described)}"
                await asyncio.sleep(pause)
    except errors.ResourceNotFoundException:
        return ""
    except errors.ConflictException as error:
        # The runtime is in transition, or has sessions.
        return aws.reason(error)
    except TimeoutError:
        pass
    return f"it was not deleted within {timeout_s:g} s"


def why_failed(described: Mapping[str, Any]) -> str:
    """Return the service's reason for the status of a runtime or endpoint."""
    return described.get("failureReason") or "AgentCore gives no reason"
