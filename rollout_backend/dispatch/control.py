"""The control plane of AgentCore: makes the runtime that the settings want, once, however many ask for it at a time.

What must always hold: `make` returns the ARN of a runtime whose endpoint serves what the settings want, or raises
PreflightError, within `ready_timeout_s`. A runtime that failed before is tried again; one that fails now is reported.
Nothing is deleted but a runtime of ours whose creation failed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend import aws
from rollout_backend.config import AgentCoreConfig
from rollout_backend.dispatch.provision import Action, Plan, RuntimeSpec, plan
from rollout_backend.errors import PreflightError

ENDPOINT = "DEFAULT"
_PAGE = 100
_PAUSE_S = (0.2, 5.0)  # between two looks at a runtime in transition: the first, and the longest

# What the service answers and takes, and the botocore that aioboto3 pins does not know yet.
NEWER_FIELDS: Mapping[str, Any] = {
    "shapes": {
        "RuntimeMetadataConfiguration": {
            "type": "structure",
            "required": ["requireMMDSV2"],
            "members": {"requireMMDSV2": {"shape": "Boolean"}},
        },
        "Boolean": {"type": "boolean", "box": True},
        "GetAgentRuntimeResponse": {
            "members": {
                "failureReason": {"shape": "String"},
                "metadataConfiguration": {"shape": "RuntimeMetadataConfiguration"},
            }
        },
        "UpdateAgentRuntimeRequest": {
            "members": {"metadataConfiguration": {"shape": "RuntimeMetadataConfiguration"}},
        },
    }
}


@asynccontextmanager
async def control_client(config: AgentCoreConfig) -> AsyncIterator[Any]:
    """A client of the control plane, with the fields that botocore lacks."""
    made = aws.client(
        "bedrock-agentcore-control",
        region=config.region,
        endpoint_url=config.endpoint_url,
        retries=2,
        newer_fields=NEWER_FIELDS,
    )
    async with made as client:
        yield client


async def make_runtime(config: AgentCoreConfig, tell: Callable[[str], object] = lambda text: None) -> str:
    """The ARN of the runtime that the settings ask for by `image`, made or updated where needed.

    Raises:
        PreflightError: what to change.
    """
    async with control_client(config) as client:
        return await RuntimeMaker(config, client, tell).make()


async def look_at_runtime(config: AgentCoreConfig) -> str:
    """What `make_runtime` would do, in words. Raises PreflightError."""
    async with control_client(config) as client:
        return await RuntimeMaker(config, client).look()


class RuntimeMaker:
    """The runtime that one run's settings ask for. `tell` is told what is being done."""

    def __init__(
        self, config: AgentCoreConfig, client: Any, tell: Callable[[str], object] = lambda text: None
    ) -> None:
        self._config = config
        self._wanted = RuntimeSpec.of(config)
        self._client = client
        self._tell = tell
        self._id: str | None = None  # of the runtime of that name, once it is known
        self._version = 0  # what we made: an older one that still shows is not the answer yet
        self._asked: list[Action] = []

    async def look(self) -> str:
        """What `make` would do, in words. Does nothing.

        Raises:
            PreflightError: it would raise it, as far as can be seen.
        """
        described = await self._find()
        found = plan(self._wanted, described)
        name = f"runtime {self._wanted.name}"
        match found.action:
            case Action.CREATE:
                return f"{name}: would be made from {self._wanted.image}"
            case Action.REPLACE:
                return f"{name}: could not be made before; would be made anew from {self._wanted.image}"
            case Action.UPDATE:
                return f"{name}: would be updated ({', '.join(found.differs) or 'its last update failed'})"
            case Action.LEAVE:
                raise self._not_ours(found)
            case _:
                assert described is not None
                return f"{name}: {'there, and ready' if found.action is Action.READY else described['status']}"

    async def make(self) -> str:
        """Sees to it that the runtime is there and ready, and returns its ARN. Raises PreflightError."""
        try:
            async with asyncio.timeout(self._config.ready_timeout_s):
                described = await self._settle()
                await self._served(int(described["agentRuntimeVersion"]))
                return str(described["agentRuntimeArn"])
        except TimeoutError:
            raise PreflightError(
                f"runtime {self._wanted.name} was not ready after {self._config.ready_timeout_s:g} s: look at it in "
                "the AgentCore console, or raise runtime.ready_timeout_s"
            ) from None

    # --- towards what is wanted ---------------------------------------------------------------------------

    async def _settle(self) -> Mapping[str, Any]:
        """Looks and acts until nothing is left to do."""
        waited = False
        for pause in _pauses():
            described = await self._find()
            found = plan(self._wanted, described)
            if described is not None:
                if self._is_stale(described):
                    found = Plan(Action.WAIT)
                elif (self._asked or waited) and described["status"].endswith("_FAILED"):
                    raise self._failed(described)
            match found.action:
                case Action.READY:
                    assert described is not None
                    return described
                case Action.LEAVE:
                    raise self._not_ours(found)
                case Action.WAIT:
                    waited = True
                case action:
                    if action in self._asked:
                        if found.differs == ("requireMMDSV2",):  # asked for, and not told back
                            assert described is not None
                            return described
                        raise PreflightError(
                            f"runtime {self._wanted.name} is being changed by somebody else at this time "
                            f"({', '.join(found.differs) or 'it was deleted'}): give each run that differs a "
                            "runtime.name of its own"
                        )
                    if await self._act(action, found):
                        self._asked.append(action)
                        continue
                    waited = True  # somebody else was first: what comes of it is as good as ours
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _is_stale(self, described: Mapping[str, Any]) -> bool:
        """What we asked for does not show yet."""
        being_deleted = self._asked[-1:] == [Action.REPLACE] and described["status"] == "CREATE_FAILED"
        return being_deleted or int(described["agentRuntimeVersion"]) < self._version

    async def _act(self, action: Action, found: Plan) -> bool:
        """False if the service is at work on that runtime, on somebody's word."""
        wanted = self._wanted
        try:
            match action:
                case Action.CREATE:
                    self._tell(f"making runtime {wanted.name} from {wanted.image}")
                    with self._explained("CreateAgentRuntime"):
                        made = await self._client.create_agent_runtime(
                            agentRuntimeName=wanted.name, **wanted.definition()
                        )
                case Action.UPDATE:
                    self._tell(f"updating runtime {wanted.name} ({', '.join(found.differs)})")
                    with self._explained("UpdateAgentRuntime"):
                        made = await self._client.update_agent_runtime(
                            agentRuntimeId=self._id,
                            metadataConfiguration={"requireMMDSV2": True},
                            **wanted.definition(),
                        )
                case _:
                    self._tell(f"deleting runtime {wanted.name}, which could not be made before")
                    with self._explained("DeleteAgentRuntime"):
                        await self._client.delete_agent_runtime(agentRuntimeId=self._id)
                    return True
        except (self._client.exceptions.ConflictException, self._client.exceptions.ResourceNotFoundException):
            return False
        self._id, self._version = str(made["agentRuntimeId"]), int(made["agentRuntimeVersion"])
        return True

    async def _served(self, version: int) -> None:
        """Waits until the endpoint serves that version, or a newer one."""
        for pause in _pauses():
            try:
                with self._explained("GetAgentRuntimeEndpoint"):
                    endpoint = await self._client.get_agent_runtime_endpoint(
                        agentRuntimeId=self._id, endpointName=ENDPOINT
                    )
            except self._client.exceptions.ResourceNotFoundException:
                endpoint = {"status": "CREATING"}  # it comes with the runtime, a little later
            if endpoint["status"] == "READY" and int(endpoint.get("liveVersion", 0)) >= version:
                return
            if endpoint["status"].endswith("_FAILED"):
                raise self._failed(endpoint)
            await asyncio.sleep(pause)

    # --- what is there ------------------------------------------------------------------------------------

    async def _find(self) -> Mapping[str, Any] | None:
        """GetAgentRuntime of the runtime of that name, or None."""
        if self._id is None:
            self._id = await self._id_by_name()
        if self._id is None:
            return None
        try:
            with self._explained("GetAgentRuntime"):
                described: dict[str, Any] = await self._client.get_agent_runtime(agentRuntimeId=self._id)
        except self._client.exceptions.ResourceNotFoundException:
            self._id, self._version = None, 0  # deleted since, by us or by somebody
            return None
        return described

    async def _id_by_name(self) -> str | None:
        with self._explained("ListAgentRuntimes"):
            pages = self._client.get_paginator("list_agent_runtimes").paginate(PaginationConfig={"PageSize": _PAGE})
            async for page in pages:
                for runtime in page["agentRuntimes"]:
                    if runtime["agentRuntimeName"] == self._wanted.name:
                        return str(runtime["agentRuntimeId"])
        return None

    # --- what goes wrong ----------------------------------------------------------------------------------

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        """Conflicts and missing runtimes are the caller's to act on; all else ends the preflight, in words."""
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
                        f"{name}: AgentCore refuses {operation}: {aws.message_of(error)}. Mend runtime.image, "
                        "runtime.role, runtime.subnets, runtime.security_groups or runtime.environment"
                    ) from error
                case "ServiceQuotaExceededException":
                    raise PreflightError(
                        f"{name}: {aws.message_of(error)}. Delete a runtime or have the quota raised, or set "
                        "runtime.arn to one that exists"
                    ) from error
                case _:
                    raise aws.preflight_error(error, name, "runtime.image") from error
        except BotoCoreError as error:
            raise aws.preflight_error(error, name, "runtime.endpoint_url") from error

    def _failed(self, described: Mapping[str, Any]) -> PreflightError:
        why = described.get("failureReason") or "AgentCore gives no reason"
        return PreflightError(
            f"runtime {self._wanted.name} is {described['status']}: {why}. Mend what it names and start again: "
            f"runtime.image ({self._wanted.image}) must be there and be built for arm64, and runtime.role "
            f"({self._wanted.role}) must trust AgentCore and may pull it"
        )

    def _not_ours(self, found: Plan) -> PreflightError:
        return PreflightError(
            f"runtime {self._wanted.name} exists, and differs in {', '.join(found.differs) or 'its status'}; it was "
            "not made by this backend, which leaves it alone: set runtime.name to another name, or runtime.arn to "
            "use it as it is"
        )


def _pauses() -> Iterator[float]:
    first, longest = _PAUSE_S
    return (min(longest, first * 1.5**i) for i in itertools.count())
