"""Remove what `rollout deploy` and runs created in an account, and list what stays.

Invariants:

- A runtime is deleted only if it has this backend's tag, and the target's ARN or role.
- A CodeBuild project is deleted only if it has this backend's tag, and the runtime's name.
- A queue is deleted only if its name belongs to a run in the target's bucket.
- A training session is deleted only if its name belongs to a run in the target's bucket.
- `find` changes nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend.agents.runtimes.agentcore.control import (
    READ_PAUSE_S,
    delete_runtime,
    list_runtimes,
    named_endpoints,
    pauses,
)
from rollout_backend.agents.runtimes.agentcore.provision import TAG
from rollout_backend.base import aws
from rollout_backend.config import StorageConfig
from rollout_backend.errors import PreflightError
from rollout_backend.run.collect.queue import queue_name
from rollout_backend.training.sagemaker import LIVE, SESSION_PREFIX, list_sessions, session_name
from rollout_backend.workbench.deploy.image import find_project, is_ours
from rollout_backend.workbench.deploy.target import Target

# Resources are deleted in this order.
_ORDER = ("session", "runtime", "project", "queue", "objects")
# DeleteObjects accepts at most 1,000 keys.
_BATCH = 1000
_DELETE_S = 300.0


@dataclass(frozen=True)
class Resource:
    """A resource that `remove` would delete."""

    kind: str
    """`session`, `runtime`, `project`, `queue` or `objects`."""
    name: str
    id: str
    """The session's name, the runtime's id, the project's name, the queue's URL, or the objects' prefix."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Inventory:
    """Resources that can be removed, and reasons for those that stay."""

    ours: Sequence[Resource]
    stays: Sequence[str]


class Teardown:
    """Removes the resources of one target. With `delete_results`, also the results of runs."""

    def __init__(self, target: Target, *, delete_results: bool = False) -> None:
        self._target = target
        self._delete_results = delete_results

    async def find(self) -> Inventory:
        """List the resources. Raises PreflightError."""
        target, ours, stays = self._target, list[Resource](), list[str]()
        async with self._clients() as (control, s3, sqs):
            async for runtime, why in self._runtimes(control):
                if why is None:
                    ours.append(Resource("runtime", runtime["agentRuntimeName"], runtime["agentRuntimeId"]))
                else:
                    stays.append(f"runtime {runtime['agentRuntimeName']}: {why}")
            await self._find_project(ours, stays)
            runs = await self._folders(s3, f"{target.prefix}runs/")
            await self._find_queues(sqs, runs, ours, stays)
            if target.trains_in_sessions:
                ours += await self._sessions(runs)
            if await self._count(s3, target.code_prefix):
                place = f"s3://{target.bucket}/{target.code_prefix}"
                ours.append(Resource("objects", f"{place} (uploaded code)", target.code_prefix))
            if results := await self._count(s3, f"{target.prefix}runs/"):
                prefix = f"{target.prefix}runs/"
                place = f"s3://{target.bucket}/{prefix}"
                if self._delete_results:
                    ours.append(Resource("objects", f"{place} (results)", prefix))
                else:
                    count = f"{results}{'+' if results == _BATCH else ''}"
                    stays.append(f"{place}: {count} objects of runs; --delete-results deletes them")
        return Inventory(ours, [*stays, *self._elsewhere()])

    async def remove(self, resources: Sequence[Resource], echo: Callable[[str], object]) -> None:
        """Delete the resources. Raises PreflightError."""
        async with self._clients() as (control, s3, sqs):
            for resource in sorted(resources, key=lambda each: _ORDER.index(each.kind)):
                echo(f"deleting {resource}")
                match resource.kind:
                    case "session":
                        await self._delete_session(resource)
                    case "runtime":
                        await self._delete_runtime(control, resource, echo)
                    case "project":
                        async with self._target.client("codebuild") as codebuild:
                            await codebuild.delete_project(name=resource.id)
                    case "queue":
                        try:
                            await sqs.delete_queue(QueueUrl=resource.id)
                        except ClientError as error:
                            if not aws.code_of(error).endswith(("NonExistentQueue", "QueueDoesNotExist")):
                                raise
                    case _:
                        await self._delete_objects(s3, resource.id)

    # --- inventory ----------------------------------------------------------------------------------------

    async def _runtimes(self, control: Any) -> AsyncIterator[tuple[Any, str | None]]:
        """Yield the target's runtimes, each with the reason why it stays, or None if it can be deleted."""
        target = self._target
        async for runtime in list_runtimes(control):
            if target.role is None:
                if runtime["agentRuntimeArn"] != target.arn:
                    continue
            else:
                try:
                    described = await _paced(control.get_agent_runtime(agentRuntimeId=runtime["agentRuntimeId"]))
                except control.exceptions.ResourceNotFoundException:
                    continue
                if described.get("roleArn") != target.role:
                    continue
            tags = (await _paced(control.list_tags_for_resource(resourceArn=runtime["agentRuntimeArn"])))["tags"]
            why = None if TAG in tags else f"it has no tag {TAG}, so `rollout deploy` and runs did not create it"
            if runtime["status"] == "DELETING":
                why = "it is being deleted"
            yield runtime, why

    async def _find_project(self, ours: list[Resource], stays: list[str]) -> None:
        """Find the CodeBuild project. These credentials may belong to a stack without permission for it."""
        name = self._target.runtime_name
        try:
            async with self._target.client("codebuild") as codebuild:
                project = await find_project(codebuild, name)
        except ClientError as error:
            if not aws.is_denied(error):
                raise
            stays.append(f"CodeBuild project {name}, if there is one: these credentials may not look for it")
            return
        if project is not None and is_ours(project):
            ours.append(Resource("project", name, name))
        elif project is not None:
            stays.append(f"CodeBuild project {name}: it has no tag {TAG}, so `rollout deploy` did not create it")

    async def _find_queues(self, sqs: Any, runs: Sequence[str], ours: list[Resource], stays: list[str]) -> None:
        target = self._target
        storage = StorageConfig(bucket=target.bucket, prefix=target.prefix)
        names = {queue_name(storage, run) for run in runs}
        names |= {f"{name}-dlq" for name in names}
        async for page in sqs.get_paginator("list_queues").paginate(
            QueueNamePrefix="rollout-", PaginationConfig={"PageSize": _BATCH}
        ):
            for url in page.get("QueueUrls", ()):
                name = url.rpartition("/")[2]
                if name in names:
                    ours.append(Resource("queue", name, url))
                elif url != target.queue_url:
                    stays.append(
                        f"queue {name}: {target.bucket} has no run of that name, so it may be another stack's"
                    )

    async def _sessions(self, runs: Sequence[str]) -> list[Resource]:
        target = self._target
        storage = StorageConfig(bucket=target.bucket, prefix=target.prefix)
        names = {session_name(storage, run) for run in runs}
        async with target.client("sagemaker", endpoint_url=target.sessions_url) as control:
            found = await list_sessions(control, SESSION_PREFIX)
        return [
            Resource("session", name, name)
            for name, status in found
            if name.rpartition("-")[0] in names and status != "Deleting"
        ]

    async def _folders(self, s3: Any, prefix: str) -> list[str]:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=self._target.bucket, Prefix=prefix, Delimiter="/")
        return [
            each["Prefix"].removeprefix(prefix).rstrip("/")
            async for page in pages
            for each in page.get("CommonPrefixes", ())
        ]

    async def _count(self, s3: Any, prefix: str) -> int:
        page = await s3.list_objects_v2(Bucket=self._target.bucket, Prefix=prefix, MaxKeys=_BATCH)
        return int(page["KeyCount"])

    def _elsewhere(self) -> list[str]:
        """Return what the user has to remove."""
        target = self._target
        if target.endpoint_url is not None:
            return []
        stays = [
            "logs: CloudWatch keeps the log groups /aws/bedrock-agentcore/runtimes/RUNTIME-*; aws logs "
            "delete-log-group deletes one. Those of CodeBuild are named /aws/codebuild/PROJECT"
        ]
        if target.stack is not None:
            stays.append(
                f"stack {target.stack} with bucket {target.bucket}: aws cloudformation delete-stack --stack-name "
                f"{target.stack} deletes the stack, and aws s3 rb --force s3://{target.bucket} its bucket"
            )
        return stays

    # --- deletion -----------------------------------------------------------------------------------------

    async def _delete_session(self, resource: Resource) -> None:
        """Stop a training session, and delete it once it has ended. Its checkpoints stay."""
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(_DELETE_S),
                self._target.client("sagemaker", endpoint_url=self._target.sessions_url) as control,
            ):
                for pause in pauses():
                    try:
                        found = await control.describe_training_session(TrainingSessionName=resource.id)
                        status = found["TrainingSessionDetail"]["TrainingSessionStatus"]
                        if status in LIVE:
                            await control.stop_training_session(TrainingSessionName=resource.id)
                        elif status not in ("Stopping", "Deleting"):
                            await control.delete_training_session(TrainingSessionName=resource.id)
                            return
                    except ClientError as error:
                        if aws.code_of(error) == "ResourceNotFound":
                            return
                        # The session ended after it was described.
                        if aws.code_of(error) != "ValidationException":
                            raise
                    await asyncio.sleep(pause)
        raise PreflightError(f"{resource} was not deleted within {_DELETE_S:g} s: run rollout down again later")

    async def _delete_runtime(self, control: Any, resource: Resource, echo: Callable[[str], object]) -> None:
        """Delete a runtime with its endpoints, and wait until it is gone. First wait for changes in progress."""
        why, errors = "", control.exceptions
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DELETE_S):
                for pause in pauses():
                    # An endpoint may be in transition, or was deleted in the meantime.
                    with contextlib.suppress(errors.ConflictException, errors.ResourceNotFoundException):
                        for endpoint in await named_endpoints(control, resource.id):
                            await control.delete_agent_runtime_endpoint(
                                agentRuntimeId=resource.id, endpointName=endpoint["name"]
                            )
                    before, why = why, await delete_runtime(control, resource.id, _DELETE_S)
                    if not why:
                        return
                    if why != before:
                        echo(f"{resource}: {why}; deleting it again")
                    await asyncio.sleep(pause)
        why = f" ({why})" if why else ""
        raise PreflightError(f"{resource} was not deleted within {_DELETE_S:g} s{why}: run rollout down again later")

    async def _delete_objects(self, s3: Any, prefix: str) -> None:
        bucket = self._target.bucket
        async for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            if keys := [{"Key": each["Key"]} for each in page.get("Contents", ())]:
                answer = await s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
                if errors := answer.get("Errors"):
                    raise PreflightError(f"s3://{bucket}/{errors[0]['Key']} was not deleted: {errors[0]['Message']}")

    @contextlib.asynccontextmanager
    async def _clients(self) -> AsyncIterator[tuple[Any, Any, Any]]:
        """Open clients of the control plane, S3 and SQS. Raise PreflightError for a failed call."""
        target = self._target
        try:
            async with target.control_client() as control, target.client("s3") as s3, target.client("sqs") as sqs:
                yield control, s3, sqs
        except (ClientError, BotoCoreError) as error:
            what = error.operation_name if isinstance(error, ClientError) else "AWS"
            raise aws.preflight_error(error, what, "--stack or CONFIG") from error


async def _paced(reading: Awaitable[Any]) -> Any:
    """Read one of many runtimes, at a rate that leaves other users of the account their calls."""
    try:
        return await reading
    finally:
        await asyncio.sleep(READ_PAUSE_S)
