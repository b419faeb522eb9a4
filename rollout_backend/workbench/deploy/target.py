"""Describe where an agent is deployed: an account, from the outputs of its CloudFormation stack, or the local cloud.

`read_stack` reads a stack of `infra/template.yaml`, and the stack of `infra/network.yaml` that it names, which makes
`--stack NAME` a complete description.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import botocore.session
from botocore.exceptions import ClientError

from rollout_backend.agents.runtimes.agentcore.control import ENDPOINT, control_client, find_runtime
from rollout_backend.base import aws
from rollout_backend.config.gateway import AUTO
from rollout_backend.errors import ConfigError, PreflightError

_OUTPUTS = frozenset({"BucketName", "AgentRoleArn", "RepositoryUri", "QueueUrl"})
_NETWORK_OUTPUTS = frozenset({"SubnetIds", "SecurityGroupId", "PublicUrl"})
# The stack's policies allow names with this prefix.
PREFIX = "rollout_"


@dataclass(frozen=True)
class Network:
    """The outputs of a stack of infra/network.yaml."""

    stack: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]
    public_url: str
    """Address of the gateway's load balancer, with `{shard}`."""
    internet: bool = True
    """Whether agents can reach the internet, and through it the load balancer."""

    def settings(self) -> dict[str, Any]:
        """Return the settings of a gateway behind the load balancer."""
        return {"host": "0.0.0.0", "port": 8000, "public_url": self.public_url} if self.internet else {}  # noqa: S104


@dataclass(frozen=True)
class Target:
    """The resources around a runtime."""

    region: str
    bucket: str
    runtime_name: str
    role: str | None = None
    """Role of the agents; None if it is unknown."""
    arn: str | None = None
    """ARN of the runtime, once it exists."""
    qualifier: str = ENDPOINT
    """Endpoint that is pinned to the deployed version and that runs use."""
    prefix: str = ""
    presigned: bool = False
    agent_protocol: str = "rollout"
    """The setting `runtime.agent_protocol` of the agents that the roles are for."""
    queue_url: str | None = None
    """Queue that runs must use; None if each run creates its own."""
    repository: str | None = None
    build_role: str | None = None
    """Role of CodeBuild; None if the stack has none."""
    stack: str | None = None
    network: Network | None = None
    """Network that the stack names; None for the public network."""
    in_network: bool = False
    """Whether agents are in subnets that the deployment named, where they may use the gateway's own address."""
    endpoint_url: str | None = None
    runtime_endpoint_url: str | None = None
    session_logs: str | None = None
    trains_in_sessions: bool = False
    """Whether runs train in sessions of SageMaker."""
    sessions_url: str | None = None
    """Endpoint of SageMaker if not AWS's."""

    @property
    def code_prefix(self) -> str:
        """Return the prefix of the runtime's code in the bucket."""
        return f"{self.prefix}code/{self.runtime_name}/"

    @property
    def is_pinned(self) -> bool:
        return self.qualifier != ENDPOINT

    def client(self, service: str, **more: Any) -> AbstractAsyncContextManager[aws.Client]:
        """Open a client of one of AWS's services around the runtime. `more` are arguments of `aws.client`."""
        return aws.client(service, **{"region": self.region, "endpoint_url": self.endpoint_url, "retries": 4, **more})

    def control_client(self) -> AbstractAsyncContextManager[Any]:
        """Open a client of AgentCore's control plane."""
        return control_client(self.region, self.runtime_endpoint_url)

    def settings(self) -> dict[str, Any]:
        """Return the part of a config that describes this target, with the runtime's ARN if it has one."""
        storage = {"bucket": self.bucket, "prefix": self.prefix, "presigned": self.presigned}
        runtime = {
            "arn": self.arn,
            "endpoint_url": self.runtime_endpoint_url,
            "session_logs": self.session_logs,
            "qualifier": self.qualifier if self.is_pinned else None,
            "agent_protocol": self.agent_protocol if self.agent_protocol != "rollout" else None,
        }
        gateway = {"port": 8000, "public_url": AUTO} if self.in_network else {}
        if self.network is not None:
            gateway = self.network.settings()
        return {
            "aws": _given({"region": self.region, "endpoint_url": self.endpoint_url}),
            "storage": _given(storage),
            **({"queue": {"url": self.queue_url}} if self.queue_url else {}),
            "runtime": {"kind": "agentcore", **_given(runtime)},
            **({"gateway": gateway} if gateway else {}),
        }


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


async def read_stack(name: str, *, endpoint_url: str | None = None) -> Target:
    """Return the target that the outputs of a stack, and of the network stack that it names, describe.

    Raises:
        PreflightError: a stack does not exist, is not complete, or was not created from its template.
    """
    region = default_region()
    parameters, outputs = await _describe(name, region, endpoint_url, "infra/template.yaml", _OUTPUTS)
    target = _read(name, region, parameters, outputs)
    if not (network := parameters.get("NetworkStack")):
        return target
    parameters, outputs = await _describe(network, region, endpoint_url, "infra/network.yaml", _NETWORK_OUTPUTS)
    return replace(
        target,
        network=Network(
            network,
            tuple(outputs["SubnetIds"].split(",")),
            (outputs["SecurityGroupId"],),
            outputs["PublicUrl"],
            internet=parameters.get("Internet") != "false",
        ),
    )


async def _describe(
    name: str, region: str, endpoint_url: str | None, template: str, wanted: frozenset[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return a stack's parameters and outputs. Raises PreflightError."""
    with aws.explained(f"stack {name}", "--stack"):
        async with aws.client("cloudformation", region=region, endpoint_url=endpoint_url, retries=4) as client:
            try:
                [stack] = (await client.describe_stacks(StackName=name))["Stacks"]
            except ClientError as error:
                # CloudFormation returns this code for a missing stack.
                if aws.code_of(error) != "ValidationError":
                    raise
                raise PreflightError(
                    f"there is no stack {name} in {region}: deploy {template}, which `rollout infra` writes, under "
                    "that name, or set AWS_REGION. If you have deleted it, rollout down CONFIG removes what is left"
                ) from error
    status = stack["StackStatus"]
    if status == "ROLLBACK_COMPLETE":
        raise PreflightError(
            f"stack {name} is {status}: its creation failed, and it cannot be updated. Delete it, correct what its "
            "events name, and create it again"
        )
    if not status.endswith("_COMPLETE") or status.startswith("DELETE"):
        raise PreflightError(f"stack {name} is {status}: wait until it is complete, or correct it")
    outputs = {each["OutputKey"]: each["OutputValue"] for each in stack.get("Outputs", ())}
    parameters = {each["ParameterKey"]: each.get("ParameterValue", "") for each in stack.get("Parameters", ())}
    if missing := wanted - outputs.keys():
        raise PreflightError(
            f"stack {name} has no output {', '.join(sorted(missing))}: it is not one of {template}, or an older one; "
            "deploy the template again"
        )
    return parameters, outputs


def _read(name: str, region: str, parameters: Mapping[str, str], outputs: Mapping[str, str]) -> Target:
    presigned = parameters.get("Presigned") == "true"
    own_queues = parameters.get("RunQueues", "true") == "true" and not presigned
    return Target(
        region=region,
        bucket=outputs["BucketName"],
        role=outputs["AgentRoleArn"],
        runtime_name=PREFIX + parameters["AgentName"],
        arn=outputs.get("RuntimeArn"),
        prefix=parameters.get("ResultPrefix", ""),
        presigned=presigned,
        agent_protocol=parameters.get("AgentProtocol", "rollout"),
        queue_url=None if own_queues else outputs["QueueUrl"],
        repository=outputs["RepositoryUri"],
        build_role=outputs.get("BuildRoleArn"),
        stack=name,
        trains_in_sessions=parameters.get("TrainingSessions") == "true",
    )


async def find_deployed(target: Target) -> Target:
    """Return the target with the ARN of its runtime.

    Raises:
        PreflightError: `rollout deploy` has not created a runtime.
    """
    if target.arn is not None:
        return target
    async with target.control_client() as client:
        with aws.explained(f"runtime {target.runtime_name}", "--stack"):
            found = await find_runtime(client, target.runtime_name)
    if found is None:
        raise PreflightError(
            f"stack {target.stack} has no runtime {target.runtime_name} yet: rollout deploy AGENT_DIR --stack "
            f"{target.stack} --yes"
        )
    return replace(target, arn=found["agentRuntimeArn"])


def default_region() -> str:
    """Return the region from AWS's environment variables or configuration. Raises ConfigError."""
    region = os.environ.get("AWS_REGION") or botocore.session.Session().get_config_variable("region")
    if not region:
        raise ConfigError("no AWS region is set: set AWS_REGION, or run aws configure")
    return str(region)


async def upload_once(target: Target, key: str, path: Path) -> None:
    """Upload a file under a key that identifies its content, unless the key exists.

    Raises:
        PreflightError: the bucket refuses the upload.
    """
    body = await asyncio.to_thread(path.read_bytes)
    with aws.explained(f"bucket {target.bucket}", "--stack"):
        async with target.client("s3", read_timeout_s=300.0) as s3:
            try:
                await s3.put_object(Bucket=target.bucket, Key=key, Body=body, IfNoneMatch="*")
            except ClientError as error:
                if aws.status_of(error) != 412:
                    raise
