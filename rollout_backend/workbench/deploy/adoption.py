"""Make a runtime that was created elsewhere invocable: `rollout deploy --adopt ARN`.

Invariants:

- An update sends back the runtime's whole definition, and changes only what AgentCore needs to invoke it.
- The runtime gets no mark or tag of this backend, so neither runs nor `rollout down` change or delete it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollout_backend.agents.runtimes.agentcore.control import (
    ENDPOINT,
    control_client,
    named_endpoints,
    pauses,
    wait_served,
    why_failed,
)
from rollout_backend.agents.runtimes.agentcore.provision import DEFINITION
from rollout_backend.base import aws
from rollout_backend.errors import PreflightError

_READ_ONLY = (
    "agentRuntimeArn",
    "agentRuntimeId",
    "agentRuntimeName",
    "agentRuntimeVersion",
    "createdAt",
    "failureReason",
    "lastUpdatedAt",
    "status",
    "workloadIdentityDetails",
    "ResponseMetadata",
)


async def adopt(
    arn: str,
    echo: Callable[[str], object],
    *,
    carry_out: bool,
    endpoint_url: str | None = None,
    timeout_s: float = 900.0,
) -> None:
    """Report what the runtime lacks and keeps. With `carry_out`, update it, and wait until that is served.

    Raises:
        PreflightError: the runtime cannot be adopted, or a call was refused; says what to do.
    """
    try:
        with aws.explained(f"runtime {arn}", "--adopt"):
            async with control_client(arn.split(":")[3], endpoint_url) as client, asyncio.timeout(timeout_s):
                await _adopt(client, arn, echo, carry_out=carry_out)
    except TimeoutError:
        raise PreflightError(f"runtime {arn} was not ready after {timeout_s:g} s: see it in the console") from None


async def _adopt(client: Any, arn: str, echo: Callable[[str], object], *, carry_out: bool) -> None:
    place = {"agentRuntimeId": arn.rpartition("/")[2]}
    described = await client.get_agent_runtime(**place)
    if described["status"] not in ("READY", "UPDATE_FAILED"):
        raise PreflightError(f"runtime {arn} is {described['status']}: wait until it is READY, or correct it")
    changes, kept = adoption_of(described)
    version = int(described["agentRuntimeVersion"])
    echo(f"runtime {described['agentRuntimeName']}, version {version}, keeps {', '.join(sorted(kept))}")
    if not changes:
        echo("it requires MMDSv2 already, so nothing is changed")
    elif not carry_out:
        echo("it would be updated to require MMDSv2, without which AgentCore does not invoke it")
        echo("nothing was changed; --yes carries this out")
        return
    else:
        version = int((await client.update_agent_runtime(**place, **kept, **changes))["agentRuntimeVersion"])
        echo(f"updating it to version {version}, which requires MMDSv2")
    for pause in pauses():
        described = await client.get_agent_runtime(**place)
        if int(described["agentRuntimeVersion"]) >= version and described["status"].endswith(("READY", "_FAILED")):
            break
        await asyncio.sleep(pause)
    if described["status"] != "READY":
        raise PreflightError(f"runtime {arn} is {described['status']}: {why_failed(described)}")
    await wait_served(client, place["agentRuntimeId"], version)
    for endpoint in await named_endpoints(client, place["agentRuntimeId"]):
        if endpoint.get("liveVersion") != str(version):
            echo(
                f"endpoint {endpoint['name']} serves version {endpoint.get('liveVersion', 'none')}: point it at "
                f"version {version}, or use the endpoint {ENDPOINT}"
            )
    echo(f"set runtime.arn to {arn}")


def adoption_of(described: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the changes that AgentCore requires before it invokes the runtime, and the definition to keep.

    Raises:
        PreflightError: the runtime has something that an update would lose, or does not serve HTTP.
    """
    kept = {name: value for name, value in described.items() if name not in _READ_ONLY and value}
    before = kept.pop("metadataConfiguration", None) or {}
    if unknown := sorted(kept.keys() - set(DEFINITION)):
        raise PreflightError(
            f"the runtime has {', '.join(unknown)}, which this version does not know, so that it would be lost: set "
            "metadataConfiguration requireMMDSV2=true by aws bedrock-agentcore-control update-agent-runtime"
        )
    protocol = kept.get("protocolConfiguration", {}).get("serverProtocol", "HTTP")
    if protocol != "HTTP":
        raise PreflightError(
            f"the runtime serves {protocol}, and runs call agents by HTTP: deploy the agent with HTTP"
        )
    changes = {} if before.get("requireMMDSV2") else {"metadataConfiguration": {**before, "requireMMDSV2": True}}
    return changes, kept
