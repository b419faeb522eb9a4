"""What `rollout down` deletes and what it leaves, against S3, SQS and a control plane that is slow and throttles."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_servers import serve_emulator
from rollout_backend.agents.runtimes.agentcore.control import ReadyRuntime, control_client, find_runtime, pin_endpoint
from rollout_backend.agents.runtimes.agentcore.provision import TAG, RuntimeSpec
from rollout_backend.config import StorageConfig
from rollout_backend.errors import PreflightError
from rollout_backend.run.collect.queue import queue_name
from rollout_backend.training.sagemaker import session_name
from rollout_backend.workbench.deploy.image import project_definition
from rollout_backend.workbench.deploy.target import Target
from rollout_backend.workbench.deploy.teardown import Resource, Teardown
from rollout_backend.workbench.local.agentcore_emulator import ROLE
from rollout_backend.workbench.local.control_plane import ControlLimits
from tests.emulators.sagemaker_emulator import GROUP, MODEL, SageMakerEmulator
from tests.emulators.sagemaker_emulator import ROLE as SESSION_ROLE
from tests.emulators.tiny_learner import TabularPolicy
from tests.simulation.clock import VirtualLoop

IMAGE = "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent:1"
BUILD_ROLE = "arn:aws:iam::123456789012:role/build"  # in moto's account
NONE: frozenset[str] = frozenset()


@asynccontextmanager
async def control_plane(folder: Path, **limits: Any) -> AsyncIterator[str]:
    images = {IMAGE: ("true",)}
    async with serve_emulator(folder, images=images, control=ControlLimits(**limits)) as (_, url):
        yield url


async def create(url: str, name: str, tags: dict[str, str]) -> None:
    spec = RuntimeSpec(name, IMAGE, ROLE, NONE, NONE, {}, 60, 600)
    async with control_client("us-east-1", url) as client:
        await client.create_agent_runtime(agentRuntimeName=name, tags=tags, **spec.definition())


def target_of(local_aws: Any, url: str, **more: Any) -> Target:
    place = {"endpoint_url": local_aws.endpoint_url, "runtime_endpoint_url": url}
    return Target("us-east-1", local_aws.bucket, "rollout_mine", **place, **more)


async def test_what_is_ours_is_deleted_and_the_rest_is_named(local_aws, tmp_path):
    storage = StorageConfig(bucket=local_aws.bucket, prefix="down/")
    queues = {name: name for name in (queue_name(storage, "run-1"), "rollout-other-1a2b3c4d")}
    keys = ("down/runs/run-1/steps/00000000/a", "down/code/rollout_mine/1.zip", "down/code/rollout_theirs/1.zip")
    async with local_aws.s3() as s3, local_aws.client("sqs") as sqs, control_plane(tmp_path, transition_s=0.3) as url:
        for key in keys:
            await s3.put_object(Bucket=local_aws.bucket, Key=key, Body=b"x")
        for name in queues:
            queues[name] = (await sqs.create_queue(QueueName=name))["QueueUrl"]
        await create(url, "rollout_mine", {TAG: "deploy"})
        await create(url, "by_hand", {})
        async with control_client("us-east-1", url) as client:
            mine = await find_runtime(client, "rollout_mine")
            runtime = ReadyRuntime(mine["agentRuntimeArn"], 1)
            await pin_endpoint(client, runtime, "training", 30.0, lambda text: None)  # a runtime with one stays
        async with local_aws.client("codebuild") as codebuild:
            for name, tags in (("rollout_mine", [{"key": TAG, "value": "deploy"}]), ("rollout_theirs", [])):
                project = project_definition(Target("us-east-1", "b", name, build_role=BUILD_ROLE)) | {"tags": tags}
                await codebuild.create_project(**project)
        target = target_of(local_aws, url, role=ROLE, prefix="down/", stack="my-agent")
        teardown = Teardown(target)
        found = await teardown.find()
        assert [each.kind for each in found.ours] == ["runtime", "project", "queue", "objects"]
        stays = "\n".join(found.stays)
        assert f"runtime by_hand: it has no tag {TAG}" in stays
        assert "queue rollout-other-1a2b3c4d: " in stays
        assert "1 objects of runs; --delete-results" in stays
        await teardown.remove(found.ours, lambda text: None)  # the runtime is still being created
        left = (await s3.list_objects_v2(Bucket=local_aws.bucket, Prefix="down/"))["Contents"]
        assert [each["Key"] for each in left] == [keys[2], keys[0]]
        await teardown.remove(found.ours, lambda text: None)  # once more: nothing is there
        async with local_aws.client("codebuild") as codebuild:
            assert (await codebuild.list_projects())["projects"] == ["rollout_theirs"]
        other = await Teardown(replace(target, runtime_name="rollout_theirs")).find()
        assert any("CodeBuild project rollout_theirs: it has no tag" in line for line in other.stays)
        everything = await Teardown(target, delete_results=True).find()
        assert [each.kind for each in everything.ours] == ["objects"]
        await sqs.delete_queue(QueueUrl=queues["rollout-other-1a2b3c4d"])
        async with control_client("us-east-1", url) as client:
            names = [each["agentRuntimeName"] for each in (await client.list_agent_runtimes())["agentRuntimes"]]
        assert names == ["by_hand"]


class Control:
    """A control plane with a hundred runtimes of this status, without endpoints. Notes when it is read."""

    exceptions = SimpleNamespace(ResourceNotFoundException=KeyError, ConflictException=IndexError)

    def __init__(self, status: str) -> None:
        self.status = status
        self.read: list[float] = []

    def get_paginator(self, _: str) -> Any:
        return self

    async def paginate(self, **_: Any) -> AsyncIterator[dict[str, Any]]:
        fields = ("agentRuntimeId", "agentRuntimeName", "agentRuntimeArn")
        runtimes = [{**dict.fromkeys(fields, f"r{i}"), "status": self.status} for i in range(100)]
        yield {"runtimeEndpoints": [], "agentRuntimes": runtimes}

    async def get_agent_runtime(self, **_: Any) -> dict[str, str]:
        self.read.append(asyncio.get_running_loop().time())
        return {"roleArn": ROLE, "status": self.status, "failureReason": "It has interfaces"}

    async def list_tags_for_resource(self, **_: Any) -> dict[str, Any]:
        self.read.append(asyncio.get_running_loop().time())
        return {"tags": {TAG: "deploy"}}

    async def delete_agent_runtime(self, **_: Any) -> None:
        pass


TEARDOWN = Teardown(Target("us-east-1", "b", "r", role=ROLE))


@pytest.mark.parametrize("why", ["it is DELETE_FAILED: It has interfaces", ""])
def test_a_runtime_that_stays_is_reported_with_the_reason(why):
    control, resource = Control("DELETE_FAILED" if why else "DELETING"), Resource("runtime", "r", "r-1")
    lines = list[str]()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(PreflightError) as caught:
        runner.run(TEARDOWN._delete_runtime(control, resource, lines.append))
    assert f"within 300 s{why and f' ({why})'}: run rollout down again" in str(caught.value)
    assert lines == ([f"runtime r: {why}; deleting it again"] if why else [])  # once, however often it fails


def test_many_runtimes_are_read_below_the_control_planes_rate():
    async def find() -> list[str | None]:
        return [why async for _, why in TEARDOWN._runtimes(control)]

    control = Control("READY")
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(find()) == [None] * 100
    assert len(control.read) == 200
    assert min(after - before for before, after in pairwise(control.read)) >= 0.25


@pytest.mark.parametrize("role", [ROLE.replace("local", "other"), None])
async def test_another_targets_runtime_stays(local_aws, tmp_path, role):
    async with control_plane(tmp_path) as url:
        await create(url, "rollout_theirs", {TAG: "deploy"})
        target = target_of(local_aws, url, role=role, prefix="nothing/")
        assert (await Teardown(target).find()).ours == []


async def test_training_sessions_of_the_buckets_runs_are_stopped_and_deleted(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    ours = session_name(StorageConfig(bucket="bucket"), "run-1")
    theirs = session_name(StorageConfig(bucket="other"), "run-1")
    async with SageMakerEmulator({MODEL: TabularPolicy(range(6))}, max_sessions=3) as emulator:
        target = Target("us-east-1", "bucket", "r", role=ROLE, trains_in_sessions=True, sessions_url=emulator.url)
        async with target.client("sagemaker", endpoint_url=emulator.url) as control:
            for name in (f"{ours}-1", f"{ours}-2", f"{theirs}-1"):
                await control.create_training_session(
                    TrainingSessionName=name,
                    RoleArn=SESSION_ROLE,
                    ModelPackageGroupArn=GROUP,
                    LoraConfig={"Rank": 8, "Alpha": 8},
                    ModelConfig={"BaseModelArn": MODEL},
                    OutputConfig={"S3Location": {"Path": "s3://bucket/checkpoints"}},
                )
        emulator.sessions[f"{ours}-1"].status = "Expired"
        teardown = Teardown(target)
        found = await teardown._sessions(["run-1", "run-2"])
        assert [resource.name for resource in found] == [f"{ours}-1", f"{ours}-2"]
        for resource in [*found, found[0]]:
            await teardown._delete_session(resource)
        assert [*emulator.sessions] == [f"{theirs}-1"]
