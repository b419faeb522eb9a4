"""Build an agent's image for arm64 and push it to the stack's repository: with docker or podman on this machine,
or in AWS CodeBuild, which needs no Docker here.

Invariants:

- A project of CodeBuild that `rollout deploy` did not create is never changed.
- No build continues in CodeBuild after `build_image` has returned or raised: it stops a build that exceeds its
  deadline or whose deployment is interrupted.
- No file that looks like a secret is uploaded. The patterns are those of the image's `.dockerignore`.
"""

import asyncio
import base64
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError

from agent_wrapper.shared.processes import wait_killed
from rollout_backend.agents.runtimes.agentcore.provision import TAG
from rollout_backend.base import aws
from rollout_backend.errors import ConfigError, PreflightError
from rollout_backend.workbench.deploy import INFRA
from rollout_backend.workbench.deploy.package import copy_agent, ignore_lines, write_wrapper_context, write_zip
from rollout_backend.workbench.deploy.target import Target, upload_once

DOCKERFILE = INFRA / "agent.Dockerfile"
CODEBUILD = "codebuild"
# CodeBuild ends a build after these limits.
_BUILD_MINUTES, _QUEUED_MINUTES = 30, 20
# CodeBuild may need this time until it can assume a newly created role.
_ROLE_S = 60.0
_LOG_LINES = 40
# Limits of a builder on this machine, which may have to emulate arm64.
_LOGIN_S, _BUILD_S = 60.0, 7200.0
# An interrupted docker must end within this time.
_END_S = 10.0
# CodeBuild throttles its calls at a few per second.
_RETRIES = 7
# Docker Hub limits anonymous pulls, and the Docker of `_IMAGE` knows this syntax without pulling it.
_SYNTAX = "# syntax=docker/dockerfile:1\n"
_IMAGE = "aws/codebuild/amazonlinux-aarch64-standard:3.0"
_BUILDSPEC = """\
version: 0.2
phases:
  build:
    commands:
      - aws ecr get-login-password | docker login --username AWS --password-stdin "${IMAGE%%/*}"
      - >-
        docker buildx build --provenance=false --platform linux/arm64 --load --file Dockerfile --tag "$IMAGE"
        --build-context wrapper=wrapper agent
      - docker push "$IMAGE"
"""


def check_builder(builder: str) -> None:
    """Raise ConfigError if this machine cannot build the image with this `--build`."""
    if builder != CODEBUILD and shutil.which(builder) is None:
        raise ConfigError(
            f"--build {builder}: there is no {builder} on this machine; --build codebuild builds the image in AWS"
        )


async def push_image(builder: str, folder: Path, target: Target, echo: Callable[[str], object]) -> str:
    """Build the image for arm64, push it under a new tag, and return its name.

    Raises:
        PreflightError: the registry refuses the login, or the builder fails.
    """
    assert target.repository is not None
    image = new_image(target)
    with aws.explained("the image registry", "--build"):
        async with target.client("ecr") as client:
            answer = await client.get_authorization_token()
    token = answer["authorizationData"][0]["authorizationToken"]
    password = base64.b64decode(token).decode().partition(":")[2]
    registry = target.repository.partition("/")[0]
    await _run([builder, "login", "--username", "AWS", "--password-stdin", registry], _LOGIN_S, password)
    echo(f"building {image}")
    with tempfile.TemporaryDirectory(prefix="rollout-deploy-") as scratch:
        dockerfile = _dockerfile(folder, Path(scratch))
        options = ["--platform", "linux/arm64", "--file", str(dockerfile), "--tag", image]
        write_wrapper_context(Path(scratch) / "wrapper")
        options += ["--build-context", f"wrapper={scratch}/wrapper"]
        if builder == "docker":
            await _run(["docker", "buildx", "build", "--provenance=false", "--push", *options, str(folder)], _BUILD_S)
        else:
            await _run([builder, "build", *options, str(folder)], _BUILD_S)
            await _run([builder, "push", image], _BUILD_S)
    return image


def new_image(target: Target) -> str:
    """Return a name for the next image, with an unused tag."""
    return f"{target.repository}:{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def _dockerfile(folder: Path, scratch: Path) -> Path:
    """Return the folder's own Dockerfile, or the default one plus the patterns of the folder's .dockerignore."""
    if (folder / "Dockerfile").is_file():
        return folder / "Dockerfile"
    # Docker ignores the folder's .dockerignore if the Dockerfile has its own.
    (scratch / "Dockerfile.dockerignore").write_text("".join(f"{line}\n" for line in ignore_lines(folder)))
    shutil.copy(DOCKERFILE, scratch / "Dockerfile")
    return scratch / "Dockerfile"


async def _run(argv: Sequence[str], limit_s: float, stdin: str | None = None) -> None:
    """Run a command of the builder, and end it after `limit_s`. Raises PreflightError."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL
    )
    what = " ".join(argv[:3])
    try:
        async with asyncio.timeout(limit_s):
            await process.communicate(stdin.encode() if stdin is not None else None)
    except TimeoutError:
        raise PreflightError(f"{what} did not end within {limit_s:g} s: its output is above") from None
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await wait_killed(process, argv[0])
    if process.returncode:
        raise PreflightError(f"{what} failed with code {process.returncode}: its output is above")


async def build_image(
    folder: Path,
    target: Target,
    echo: Callable[[str], object],
    *,
    limit_s: float = 60.0 * (_BUILD_MINUTES + _QUEUED_MINUTES + 5),
    poll_s: float = 3.0,
) -> str:
    """Upload the folder, build its image, and return the image's name. A build that takes longer than `limit_s` is
    stopped.

    Raises:
        PreflightError: a call was refused, or the build failed; includes the end of its log.
    """
    image = new_image(target)
    with tempfile.TemporaryDirectory(prefix="rollout-deploy-") as scratch:
        archive = Path(scratch) / "source.zip"
        digest = await asyncio.to_thread(_pack, folder, Path(scratch) / "source", archive)
        key = f"{target.code_prefix}{digest}.source.zip"
        echo(f"uploading {archive.stat().st_size / 1e6:.1f} MB of source to s3://{target.bucket}/{key}")
        await upload_once(target, key, archive)
    with aws.explained(f"CodeBuild project {target.runtime_name}", "--build-role"):
        async with target.client("codebuild", retries=_RETRIES) as client:
            await _ensure_project(client, target, echo, poll_s)
            await _Build(client, target, f"{target.bucket}/{key}", image, echo, poll_s).run(limit_s)
    return image


def project_definition(target: Target) -> dict[str, Any]:
    """Return the arguments that CreateProject and UpdateProject share."""
    assert target.build_role is not None
    return {
        "name": target.runtime_name,
        "description": "builds the image of an agent, for rollout deploy",
        "source": {"type": "S3", "location": f"{target.bucket}/{target.code_prefix}", "buildspec": _BUILDSPEC},
        "artifacts": {"type": "NO_ARTIFACTS"},
        "environment": {
            "type": "ARM_CONTAINER",
            "image": _IMAGE,
            "computeType": "BUILD_GENERAL1_SMALL",
            # Docker requires this mode.
            "privilegedMode": True,
        },
        "serviceRole": target.build_role,
        "timeoutInMinutes": _BUILD_MINUTES,
        "queuedTimeoutInMinutes": _QUEUED_MINUTES,
        "tags": [{"key": TAG, "value": "deploy"}],
    }


async def find_project(client: Any, name: str) -> Mapping[str, Any] | None:
    """Return the project as BatchGetProjects describes it, or None."""
    found: list[Mapping[str, Any]] = (await client.batch_get_projects(names=[name]))["projects"]
    return found[0] if found else None


def is_ours(project: Mapping[str, Any]) -> bool:
    """Return whether `rollout deploy` created the project."""
    return any(tag["key"] == TAG for tag in project.get("tags") or ())


def _pack(folder: Path, source: Path, target: Path) -> str:
    """Write the zip that CodeBuild builds: the Dockerfile, the agent's folder and the wrapper. Return its digest."""
    agent = source / "agent"
    agent.mkdir(parents=True)
    copy_agent(folder, agent)
    own = folder / "Dockerfile"
    text = (own if own.is_file() else DOCKERFILE).read_text()
    (source / "Dockerfile").write_text(text.removeprefix(_SYNTAX))
    write_wrapper_context(source / "wrapper")
    return write_zip(source, target)


async def _ensure_project(client: Any, target: Target, echo: Callable[[str], object], poll_s: float) -> None:
    """Create or update the project, unless it exists and is up to date."""
    wanted = project_definition(target)
    name, deadline = wanted["name"], time.monotonic() + _ROLE_S
    project = await find_project(client, name)
    if project is not None and not is_ours(project):
        raise PreflightError(
            f"CodeBuild project {name} exists, and rollout deploy did not create it: delete it, or give the stack "
            "another AgentName"
        )
    if project is not None and _includes(project, wanted):
        return
    change = client.create_project if project is None else client.update_project
    echo(f"{'creating' if project is None else 'updating'} CodeBuild project {name}")
    while True:
        try:
            await change(**wanted)
        except ClientError as error:
            is_new_role = "sts:AssumeRole" in aws.message_of(error) and time.monotonic() < deadline
            if not is_new_role:
                raise
            await asyncio.sleep(poll_s)
        else:
            return


def _includes(actual: Any, wanted: Any) -> bool:
    """Return whether a description, to which the service adds defaults, has all wanted values."""
    if isinstance(wanted, dict):
        return isinstance(actual, dict) and all(_includes(actual.get(key), value) for key, value in wanted.items())
    return bool(actual == wanted)


@dataclass(frozen=True)
class _Build:
    """One build, from its start to its end."""

    client: Any
    target: Target
    source: str
    image: str
    echo: Callable[[str], object]
    poll_s: float

    async def run(self, limit_s: float) -> None:
        """Start the build and wait for its end. Stop it after `limit_s`, or if this task is cancelled."""
        build_id = await self._start()
        self.echo(f"building {self.image} in CodeBuild")
        try:
            async with asyncio.timeout(limit_s):
                build = await self._ended(build_id)
        except BaseException as error:
            await asyncio.shield(self._stop(build_id))
            if isinstance(error, TimeoutError):
                raise PreflightError(f"build {build_id} was stopped: it did not end within {limit_s:g} s") from None
            raise
        if build["buildStatus"] != "SUCCEEDED":
            raise PreflightError(f"{_describe_failure(build)}. {await self._log_tail(build)}")

    async def _start(self) -> str:
        try:
            answer = await self.client.start_build(
                projectName=self.target.runtime_name,
                # With the token, a retried call starts no second build.
                idempotencyToken=str(uuid4()),
                sourceLocationOverride=self.source,
                environmentVariablesOverride=[{"name": "IMAGE", "value": self.image, "type": "PLAINTEXT"}],
            )
        except ClientError as error:
            if aws.code_of(error) != "AccountLimitExceededException":
                raise
            raise PreflightError(
                f"CodeBuild starts no build: {aws.message_of(error)}. Wait for other builds, or raise the quota "
                '"Concurrently running builds for ARM/Small environment" in Service Quotas, which is 0 or 1 in some '
                "new accounts"
            ) from error
        return str(answer["build"]["id"])

    async def _ended(self, build_id: str) -> Mapping[str, Any]:
        phase = ""
        while True:
            builds = (await self.client.batch_get_builds(ids=[build_id]))["builds"]
            # CodeBuild does not find a build that was just started.
            build = builds[0] if builds else {}
            if build.get("buildComplete"):
                return dict(build)
            if build.get("currentPhase", phase) != phase:
                phase = build["currentPhase"]
                self.echo(f"  {phase.lower().replace('_', ' ')}")
            await asyncio.sleep(self.poll_s)

    async def _stop(self, build_id: str) -> None:
        try:
            await self.client.stop_build(id=build_id)
        except (ClientError, BotoCoreError) as error:
            self.echo(f"build {build_id} was not stopped and ends after {_BUILD_MINUTES} min at most: {error}")

    async def _log_tail(self, build: Mapping[str, Any]) -> str:
        place = build.get("logs", {})
        if "streamName" not in place:
            return "It has no log"
        group, stream = place["groupName"], place["streamName"]
        try:
            async with self.target.client("logs", retries=_RETRIES) as logs:
                answer = await logs.get_log_events(logGroupName=group, logStreamName=stream, limit=_LOG_LINES)
        except (ClientError, BotoCoreError) as error:
            return f"Its log, {group} {stream} in CloudWatch, cannot be read: {error}"
        lines = "\n".join(event["message"].rstrip() for event in answer["events"])
        return f"Its log, {group} {stream} in CloudWatch, ends:\n{lines}"


def _describe_failure(build: Mapping[str, Any]) -> str:
    failed = [phase for phase in build.get("phases", ()) if phase.get("phaseStatus", "SUCCEEDED") != "SUCCEEDED"]
    why = [context["message"] for phase in failed for context in phase.get("contexts", ()) if context.get("message")]
    where = f" in phase {failed[0]['phaseType']}" if failed else ""
    return f"build {build['id']} ended as {build['buildStatus']}{where}{': ' if why else ''}{'; '.join(why)}"
