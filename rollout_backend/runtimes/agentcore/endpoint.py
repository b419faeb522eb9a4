"""Pin named endpoints of a runtime to a version, which later deployments leave alone.

Invariants:

- `pin_endpoint` returns once the endpoint serves the version, or raises PreflightError;
- an endpoint that already serves the version is not changed.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend import aws
from rollout_backend.errors import PreflightError
from rollout_backend.runtimes.agentcore.control import ENDPOINT, ReadyRuntime, pauses


async def pin_endpoint(
    client: Any, runtime: ReadyRuntime, name: str, timeout_s: float, on_status: Callable[[str], object]
) -> None:
    """Create or update the endpoint `name`, and wait until it serves the runtime's version.

    Raises:
        PreflightError: AgentCore refused the endpoint, or it did not serve the version in time.
    """
    pinning = _Pinning(client, runtime, name, on_status)
    try:
        async with asyncio.timeout(timeout_s):
            await pinning.run()
    except TimeoutError:
        raise PreflightError(
            f"endpoint {name} of {runtime.arn} did not serve version {runtime.version} after {timeout_s:g} s: see it "
            "in the AgentCore console, and deploy again"
        ) from None
    except (ClientError, BotoCoreError) as error:
        raise aws.preflight_error(error, f"endpoint {name} of {runtime.arn}", "runtime.qualifier") from error


async def named_endpoints(client: Any, runtime_id: str) -> list[str]:
    """Return the names of a runtime's endpoints except DEFAULT."""
    pages = client.get_paginator("list_agent_runtime_endpoints").paginate(agentRuntimeId=runtime_id)
    names = [each["name"] async for page in pages for each in page["runtimeEndpoints"]]
    return [name for name in names if name != ENDPOINT]


class _Pinning:
    def __init__(self, client: Any, runtime: ReadyRuntime, name: str, on_status: Callable[[str], object]) -> None:
        self._client = client
        self._place = {"agentRuntimeId": runtime.arn.rpartition("/")[2]}
        self._version = str(runtime.version)
        self._name = name
        self._on_status = on_status
        self._asked = False

    async def run(self) -> None:
        for pause in pauses():
            endpoint = await self._describe()
            if self._is_pinned(endpoint):
                return
            if not self._asked and (endpoint is None or endpoint["status"].endswith(("READY", "_FAILED"))):
                self._asked = await self._ask(endpoint)
            elif endpoint is not None and endpoint["status"].endswith("_FAILED"):
                why = endpoint.get("failureReason") or "AgentCore gives no reason"
                raise PreflightError(f"endpoint {self._name} is {endpoint['status']}: {why}")
            await asyncio.sleep(pause)

    def _is_pinned(self, endpoint: Mapping[str, Any] | None) -> bool:
        if endpoint is None or endpoint["status"] != "READY":
            return False
        return bool(endpoint.get("liveVersion") == self._version)

    async def _describe(self) -> Mapping[str, Any] | None:
        try:
            described: dict[str, Any] = await self._client.get_agent_runtime_endpoint(
                **self._place, endpointName=self._name
            )
        except self._client.exceptions.ResourceNotFoundException:
            return None
        return described

    async def _ask(self, endpoint: Mapping[str, Any] | None) -> bool:
        """Request the version. Return False if the runtime or the endpoint is in transition."""
        what = {**self._place, "agentRuntimeVersion": self._version}
        try:
            if endpoint is None:
                self._on_status(f"making endpoint {self._name} for version {self._version}")
                await self._client.create_agent_runtime_endpoint(name=self._name, **what)
            else:
                before = endpoint.get("liveVersion", "none")
                self._on_status(f"moving endpoint {self._name} from version {before} to {self._version}")
                await self._client.update_agent_runtime_endpoint(endpointName=self._name, **what)
        except self._client.exceptions.ConflictException:
            return False
        return True
