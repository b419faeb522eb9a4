"""Deploy an agent: check it, upload its code or its image, create its runtime, run one rollout on it, and write the
config of its runs.

Invariants:

- Nothing is created or changed in the account before the agent has passed its check and `deploy` is called.
- Deploying an equal zip or image again changes no runtime.
- A config file that `rollout deploy` did not write is not overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    Outcome,
    ResultTarget,
    Rollout,
    RolloutRequest,
    Sampling,
)
from rollout_backend.agents.runtimes.agentcore.control import ENDPOINT, RuntimeMaker, pin_endpoint
from rollout_backend.agents.runtimes.agentcore.provision import TAG, CodeArtifact, RuntimeSpec
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.base import aws
from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.names import derived_name
from rollout_backend.config import AgentCoreConfig, is_placeholder, merge_overrides, read_yaml
from rollout_backend.config.gateway import AUTO
from rollout_backend.config.runtimes import DEFINITION
from rollout_backend.errors import ConfigError, InvokeRejected, NoCredentials, PreflightError, RuntimeCallError
from rollout_backend.workbench.deploy.calls import Call, calls_of_deployment
from rollout_backend.workbench.deploy.image import CODEBUILD, build_image, push_image
from rollout_backend.workbench.deploy.package import make_package
from rollout_backend.workbench.deploy.target import PREFIX, Target, upload_once

WRITTEN = "# Written by `rollout deploy`, which overwrites this file."
_READY_S = 900.0
# The image and the role are unknown until the agent is deployed.
_UNKNOWN = {
    "image": "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent:1",
    "role": "arn:aws:iam::000000000000:role/agent",
}
_DEFAULTS = AgentCoreConfig.model_validate(_UNKNOWN)
_NOWHERE = "http://127.0.0.1:9/v1"
_REMAINING_S = 2.0
_RESULT_S = 60.0
# The first session pulls the image, and the runtime may throttle.
_START_S = 300.0
_POLL_S = 0.3


@dataclass(frozen=True)
class Deployment:
    """Deployment of one agent's folder. `build` is `code`, `codebuild`, `docker` or `podman`."""

    folder: Path
    target: Target
    build: str = "code"
    native: bool = False
    """Whether the code runs on this machine, in the local cloud."""
    subnets: tuple[str, ...] = ()
    """Subnets of the agents. Default: those of the target's network."""
    security_groups: tuple[str, ...] = ()
    runtime: AgentCoreConfig = _DEFAULTS
    """The result of `runtime_settings`."""

    def plan(self) -> Iterator[str]:
        """Yield what `deploy` would do, one line each."""
        target = self.target
        if self.build == "code":
            place = "this machine" if self.native else "Linux on arm64"
            yield f"pack {self.folder} with its packages for {place}, without Docker"
            yield f"upload it to s3://{target.bucket}/{target.code_prefix}"
        elif self.build == CODEBUILD:
            yield f"upload {self.folder} to s3://{target.bucket}/{target.code_prefix}"
            yield f"create or update CodeBuild project {target.runtime_name} under the role {target.build_role}"
            yield f"build the image on arm64, without Docker on this machine, and push it to {target.repository}"
        else:
            yield f"build the image of {self.folder} for arm64 with {self.build}, and push it to {target.repository}"
        yield f"create or update runtime {target.runtime_name} under the role {target.role}"
        for name in DEFINITION:
            if (value := getattr(self.runtime, name)) != getattr(_DEFAULTS, name):
                shown = ", ".join(value) if isinstance(value, dict) else value
                yield f"give it {name}: {shown}"
        if self.runtime.capacity_provider is not None:
            yield "build for arm64 only: for x86 instances, push an image and set runtime.image instead of deploying"
        subnets, _ = self._network()
        yield f"run its sessions in {', '.join(subnets) or 'the public network'}"
        yield "wait until its endpoint DEFAULT serves it"
        if target.is_pinned:
            yield f"pin its endpoint {target.qualifier} to that version, which later deployments do not change"
        yield "run one rollout on it"

    def calls(self) -> tuple[Call, ...]:
        """Return the AWS calls of the command. There is no stack on this machine."""
        calls = calls_of_deployment(self.build, pinned=self.target.is_pinned)
        return tuple(call for call in calls if not (self.native and call.name == "DescribeStacks"))

    async def deploy(self, payload: Mapping[str, Any], echo: Callable[[str], object]) -> Target:
        """Carry out the plan. Return the target with the runtime's ARN.

        Raises:
            ConfigError: the agent's packages cannot be installed.
            PreflightError: a call was refused, or the runtime does not work; says what to do.
        """
        target = self.target
        image = await self._publish(echo)
        subnets, security_groups = self._network()
        assert target.role is not None
        spec = replace(
            RuntimeSpec.of(self.runtime),
            name=target.runtime_name,
            image=image,
            role=target.role,
            subnets=frozenset(subnets),
            security_groups=frozenset(security_groups),
        )
        async with target.control_client() as client:
            maker = RuntimeMaker(
                spec, client, _READY_S, tags={TAG: "deploy"}, ecr_url=target.endpoint_url, on_status=echo
            )
            runtime = await maker.make()
            if target.is_pinned:
                await pin_endpoint(client, runtime, target.qualifier, _READY_S, echo)
        deployed = replace(target, arn=runtime.arn, in_network=bool(self.subnets))
        echo(f"runtime {runtime.arn} is ready; running one rollout on it")
        echo(await run_smoke_rollout(deployed, payload))
        return deployed

    def _network(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        network = self.target.network
        if self.subnets or network is None:
            return self.subnets, self.security_groups
        return network.subnets, network.security_groups

    async def _publish(self, echo: Callable[[str], object]) -> CodeArtifact | str:
        """Upload the code or build the image. Return what the runtime will run."""
        match self.build:
            case "code":
                return await self._upload(echo)
            case "codebuild":
                return await build_image(self.folder, self.target, echo)
        return await push_image(self.build, self.folder, self.target, echo)

    async def _upload(self, echo: Callable[[str], object]) -> CodeArtifact:
        target = self.target
        with tempfile.TemporaryDirectory(prefix="rollout-deploy-") as scratch:
            echo(f"packing {self.folder}")
            package = await make_package(self.folder, Path(scratch) / "code.zip", native=self.native)
            code = CodeArtifact(target.bucket, f"{target.code_prefix}{package.digest}.zip", package.python)
            echo(f"uploading {package.size / 1e6:.1f} MB with {package.packages} packages to {code}")
            await upload_once(target, code.key, package.path)
        return code


def runtime_name(folder: Path) -> str:
    """Return the name of the runtime for an agent's folder."""
    return derived_name(f"{PREFIX}{folder.absolute().name}", "A-Za-z0-9_", 48, separator="_")


def runtime_settings(folder: Path, overrides: Sequence[str]) -> AgentCoreConfig:
    """Return the settings of the runtime and its endpoint, from the folder's config and the overrides.

    Raises:
        ConfigError: AgentCore would refuse the settings.
    """
    own = folder / "config.yaml"
    tree = read_yaml(own) if own.is_file() else {}
    if (tree.get("runtime") or {}).get("kind", "agentcore") != "agentcore":
        tree = {}
    merge_overrides(tree, overrides)
    given = tree.get("runtime") or {}
    name = given.get("qualifier", ENDPOINT)
    if not isinstance(name, str) or not re.fullmatch("[a-zA-Z][a-zA-Z0-9_]{0,47}", name):
        raise ConfigError(
            f"runtime.qualifier={name!r} is no name of an endpoint: a letter, then at most 47 letters, digits and "
            "underscores"
        )
    try:
        found = AgentCoreConfig.model_validate(
            {**_UNKNOWN, **{key: given[key] for key in DEFINITION if key in given}}
        )
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, ('runtime', *each['loc'])))}: {each['msg']}" for each in error.errors())
        raise ConfigError("; ".join(problems)) from None
    return found.model_copy(update={"qualifier": name})


def config_text(
    settings: Mapping[str, Any], folder: Path, replaced: Mapping[str, Any], overrides: Sequence[str]
) -> str:
    """Return the config for runs on a target, as YAML.

    It consists of the folder's own config, the target's `settings`, the `replaced` sections, and the overrides. The
    target's settings replace whole sections, except the gateway's. Sections replaced by an empty one are left out,
    and so are the runtime's own settings, because runs use the runtime by its ARN.
    """
    own = folder / "config.yaml"
    tree: dict[str, Any] = {"model": {"path": "/models/yours"}, **(read_yaml(own) if own.is_file() else {})}
    own_gateway, found = dict(tree.get("gateway") or {}), settings.get("gateway", {})
    if is_placeholder(own_gateway.get("public_url")) and found:
        del own_gateway["public_url"]
    # `auto` is a default, unlike a load balancer's settings.
    gateway = {**found, **own_gateway} if found.get("public_url") == AUTO else {**own_gateway, **found}
    tree |= {"queue": {}, **settings, "gateway": gateway, **replaced}
    tree = {section: value for section, value in tree.items() if value != {}}
    merge_overrides(tree, overrides)
    runtime = runtime_settings(folder, overrides)
    prices: dict[str, Any] = {"platform": runtime.named_platform} if runtime.named_platform in ("V1", "V2") else {}
    if runtime.capacity_provider is not None:
        # The sessions run on EC2 instances.
        prices |= {"vcpu_hour": 0.0, "gb_hour": 0.0}
    if prices:
        tree["prices"] = {**prices, **(tree.get("prices") or {})}
    tree["runtime"] = {name: value for name, value in tree["runtime"].items() if name not in DEFINITION}
    return f"{WRITTEN}\n{yaml.safe_dump(tree, sort_keys=False)}"


def write_config(path: Path, text: str) -> bool:
    """Write the config, unless a user wrote the file. Only the owner can read it, because it has the URL of a local
    cloud. Return whether it was written."""
    if path.exists() and not path.read_text().startswith(WRITTEN):
        return False
    write_file(path, text.encode(), private=True)
    return True


async def run_smoke_rollout(target: Target, payload: Mapping[str, Any]) -> str:
    """Run one rollout on a deployed runtime, before any training, and stop its session. Return a description of what
    it proved.

    Its model endpoint does not exist. A result of `model_unreachable` therefore proves that a session starts, the
    wrapper accepts the contract, and the agents' role may write to the bucket.

    Raises:
        PreflightError: the rollout could not be started, or published no result.
    """
    settings = target.settings()["runtime"]
    config = AgentCoreConfig.model_validate({**settings, "read_timeout_s": 150.0})
    runtime = await AgentCoreRuntime.open(config)
    session_id = f"deploy-{uuid.uuid4()}-{uuid.uuid4().hex[:8]}"
    request = RolloutRequest(
        run_id="deploy",
        step=0,
        task_id="smoke",
        rollout_id=session_id[:60],
        attempt=1,
        session_id=session_id,
        endpoint=ModelEndpoint(base_url=_NOWHERE, api_key="none", name="none", trajectory_url=_NOWHERE),
        sampling=Sampling(),
        deadline=time.time() + _REMAINING_S,
        remaining_s=_REMAINING_S,
        publish_grace_s=_RESULT_S,
        result=ResultTarget(bucket=target.bucket, prefix=target.prefix, region=target.region),
    )
    body = json.dumps({**payload, REQUEST_FIELD: request.model_dump(mode="json")}).encode()
    try:
        await _invoke(runtime, session_id, body)
        if target.presigned:
            return "a session starts and accepts a rollout; each run signs the URLs of its results"
        rollout = await _read_result(target, request, runtime)
    finally:
        # If the stop fails, the session ends at its idle timeout.
        with contextlib.suppress(RuntimeCallError):
            await runtime.stop(session_id)
        await runtime.aclose()
    reason = rollout.failure.reason if rollout.failure else ""
    if reason != "model_unreachable":
        raise PreflightError(f"the smoke rollout ended as {rollout.outcome}, {reason}, not as model_unreachable")
    return "a session starts, accepts a rollout, and writes its result"


async def _invoke(runtime: AgentCoreRuntime, session_id: str, body: bytes) -> None:
    """Start the rollout. Retry while the runtime is busy: the wrapper answers a repeated invoke from memory."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            await runtime.invoke(session_id, body)
            break
        except RuntimeCallError as error:
            is_final = isinstance(error, (InvokeRejected, NoCredentials)) and error.reason != "runtime_not_found"
            if is_final or time.monotonic() > deadline:
                raise PreflightError(
                    f"the smoke rollout was not accepted: {error}. The sessions' log: "
                    f"{runtime.log_location(session_id)}"
                ) from error
        await asyncio.sleep(2.0)


async def _read_result(target: Target, request: RolloutRequest, runtime: AgentCoreRuntime) -> Rollout:
    with aws.explained(f"bucket {target.bucket}", "--stack"), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RESULT_S), target.client("s3") as s3:
            while True:
                for key in (request.key_for(Outcome.INFRA_ERROR), request.key):
                    with contextlib.suppress(s3.exceptions.NoSuchKey):
                        answer = await s3.get_object(Bucket=target.bucket, Key=key)
                        return Rollout.decode(await answer["Body"].read())
                await asyncio.sleep(_POLL_S)
    raise PreflightError(
        f"the smoke rollout was accepted but wrote no result within {_RESULT_S:g} s: check that the agents' role may "
        f"write to the bucket. The session's log: {runtime.log_location(request.session_id)}"
    )
