"""A deployment and its removal with the stack's policies in force: they make exactly the calls that the docs list."""

import asyncio
import site
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import agent_wrapper
from builders import eventually, served
from rollout_backend.config import StorageConfig
from rollout_backend.errors import PreflightError
from rollout_backend.run.collect.queue import queue_name
from rollout_backend.workbench.deploy import deployment as deployment_module
from rollout_backend.workbench.deploy import image as image_module
from rollout_backend.workbench.deploy.adoption import adopt
from rollout_backend.workbench.deploy.calls import ADOPT, DOWN, Call, calls_of_deployment
from rollout_backend.workbench.deploy.deployment import Deployment
from rollout_backend.workbench.deploy.package import CodePackage
from rollout_backend.workbench.deploy.target import find_deployed, read_stack
from rollout_backend.workbench.deploy.teardown import Teardown
from rollout_backend.workbench.local.cloud import LocalRuntime
from rollout_backend.workbench.local.control_plane import ControlLimits
from stacks import described_stack
from tests.emulators.codebuild_emulator import CodeBuildEmulator
from tests.emulators.ecr_emulator import EcrEmulator
from tests.emulators.iam_proxy import IamProxy

AGENT = """
import sys
sys.path[:0] = {path!r}
from agent_wrapper import RolloutApp
app = RolloutApp()
app.entrypoint(lambda context: 1.0)
app.run()
"""
BUCKET = "recorded-calls"  # of this test alone, because it deletes what is in it
BUILD_ROLE = "arn:aws:iam::000000000000:role/build"
IMAGE = "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent:1"
NOT_SEEN = {"iam:CreateServiceLinkedRole"}  # once for an account


OF_UPDATE = {"bedrock-agentcore:UpdateAgentRuntimeEndpoint"}
OF_CREATION = {  # of the runtime, which the first deployment has created
    f"bedrock-agentcore:{name}"
    for name in ("CreateAgentRuntime", "CreateAgentRuntimeEndpoint", "CreateWorkloadIdentity", "TagResource")
}


def actions_of(calls: tuple[Call, ...]) -> set[str]:
    """Return the actions of these calls, without those on training sessions, which this account has none of."""
    return {action for call in calls if not call.sessions for action in call.actions}


def write_programs(folder: Path, build: str) -> dict[str, str]:
    """Write an aws and a docker that push nothing."""
    for name, text in {"aws": "echo secret", "docker": f'if [ "$1" = buildx ]; then {build}; else true; fi'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.slow
async def test_deploy_and_down_make_the_calls_that_the_table_lists(storage, stack, tmp_path, monkeypatch):
    packages = [str(Path(agent_wrapper.__file__).parents[1]), *site.getsitepackages()]

    async def package(folder: Path, target: Path, *, native: bool) -> CodePackage:
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("agent.py", AGENT.format(path=packages))
        return CodePackage(target, f"{sys.version_info.major}.{sys.version_info.minor}", "digest", 0)

    monkeypatch.setattr(deployment_module, "make_package", package)
    for name, value in {**storage.environ, "AWS_ACCESS_KEY_ID": "deployer"}.items():
        monkeypatch.setenv(name, value)
    made = stack(
        {
            "Bucket": f"arn:aws:s3:::{BUCKET}",
            "Queue": "arn:aws:sqs:us-east-1:000000000000:stack",
            "AgentRole": "arn:aws:iam::000000000000:role/local",
            "BuildRole": BUILD_ROLE,
            "Repository": "arn:aws:ecr:us-east-1:000000000000:repository/agent",
        },
        AgentName="agent",
    )
    outputs = {
        "BucketName": BUCKET,
        "AgentRoleArn": "arn:aws:iam::000000000000:role/local",
        "BuildRoleArn": BUILD_ROLE,
        "RepositoryUri": "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent",
        "QueueUrl": f"{storage.endpoint_url}/000000000000/stack",
    }
    async with storage.s3() as s3:
        await s3.create_bucket(Bucket=BUCKET)
    proxy = IamProxy({"s3": storage.endpoint_url, "sqs": storage.endpoint_url}, {})
    proxy.principals = {
        "deployer": made.policy("DeployerPolicy"),
        "agent": made.policy("AgentRole"),
        "builder": made.policy("BuildRole"),
    }
    env = {**storage.environ, "AWS_ENDPOINT_URL": storage.endpoint_url}
    control = ControlLimits(invisible_s=0.5, calls_per_s=20)
    images = {IMAGE: (sys.executable, str(tmp_path / "agent" / "agent.py"))}
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.py").write_text(AGENT.format(path=packages))
    monkeypatch.setattr(image_module, "new_image", lambda target: IMAGE)

    async def describe(_: web.Request) -> web.Response:
        return web.Response(text=described_stack(outputs, {"AgentName": "agent"}), content_type="text/xml")

    async with (
        served(describe) as cloudformation,
        LocalRuntime(None, run_dir=tmp_path, env=env, control=control, images=images) as runtime,
        proxy,
        CodeBuildEmulator(proxy.url, environ=write_programs(tmp_path, "true"), role=BUILD_ROLE) as codebuild,
        EcrEmulator() as ecr,
    ):
        proxy.upstreams |= {"bedrock-agentcore": runtime.endpoint_url, "cloudformation": cloudformation}
        proxy.upstreams |= {"codebuild": codebuild.url, "logs": codebuild.url, "ecr": ecr.url}
        told: list[str] = []
        target = await read_stack("my-agent", endpoint_url=proxy.url)
        place: dict[str, Any] = {"endpoint_url": proxy.url, "runtime_endpoint_url": proxy.url}
        target = replace(target, **place, qualifier="training")
        deployed = await Deployment(tmp_path, target, native=True).deploy({}, told.append)
        assert "accepts a rollout, and writes its result" in told[-1]
        assert (await find_deployed(target)).arn == deployed.arn
        assert proxy.denied == []
        seen = {access.action for _, access in proxy.accesses}
        assert seen == actions_of(calls_of_deployment("code", pinned=True)) - NOT_SEEN - OF_UPDATE
        proxy.accesses.clear()
        assert deployed.arn is not None
        await adopt(deployed.arn, told.append, carry_out=True, endpoint_url=proxy.url)  # there is nothing to update
        assert proxy.denied == []
        seen = {access.action for _, access in proxy.accesses}
        assert seen == actions_of(ADOPT) - {"bedrock-agentcore:UpdateAgentRuntime", "iam:PassRole"}
        proxy.accesses.clear()
        target = replace(await read_stack("my-agent", endpoint_url=proxy.url), **place, qualifier="training")
        by_image = Deployment(tmp_path / "agent", target, "codebuild")
        write_programs(tmp_path, "exit 1")
        with pytest.raises(PreflightError, match="exit status 1"):
            await by_image.deploy({}, told.append)
        write_programs(tmp_path, "sleep 600")
        deploying = asyncio.create_task(by_image.deploy({}, told.append))
        await eventually(lambda: told[-1] == "  build")
        deploying.cancel()
        await asyncio.wait([deploying])  # it has stopped its build
        write_programs(tmp_path, "true")
        codebuild.projects["rollout_agent"]["timeoutInMinutes"] = 5
        ecr.push(IMAGE, "amd64")
        with pytest.raises(PreflightError, match=f"image {IMAGE} is built for amd64"):
            await by_image.deploy({}, told.append)
        ecr.push(IMAGE, "arm64")
        assert (await by_image.deploy({}, told.append)).arn == deployed.arn
        assert proxy.denied == []
        seen = {access.action for who, access in proxy.accesses if who == "deployer"}
        assert seen == actions_of(calls_of_deployment("codebuild", pinned=True)) - NOT_SEEN - OF_CREATION
        assert {access.action for who, access in proxy.accesses if who == "builder"} == {"s3:GetObject"}
        proxy.accesses.clear()
        async with storage.client("sqs") as sqs:
            await sqs.create_queue(QueueName=queue_name(StorageConfig(bucket=target.bucket), "deploy"))
        target = replace(await read_stack("my-agent", endpoint_url=proxy.url), **place)
        teardown = Teardown(target, delete_results=True)
        found = await teardown.find()
        await teardown.remove(found.ours, told.append)
        assert proxy.denied == []
        assert {access.action for _, access in proxy.accesses} == actions_of(DOWN)
        assert (await teardown.find()).ours == []
