"""An emulator of AWS CodeBuild, and of the log that a build writes to CloudWatch, for `rollout deploy`.

    async with CodeBuildEmulator(s3_url, environ={"PATH": programs}, role=ROLE) as codebuild:
        ...  # clients of `codebuild` and `logs` use codebuild.url as their endpoint

A build downloads its source from S3 under the access key `builder`, unpacks it, and runs the commands of its
buildspec in a shell on this machine, with the programs of `environ`. Like the service, the emulator does not find a
build that has just started, refuses a role that it cannot assume yet, throttles, limits the builds of an account, and
ends a build that takes longer than its project allows.

Invariants:

- Every process of a build ends with the build, and every build with the emulator.

It does not verify signatures, isolate builds, or implement phases other than `build`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import yaml
from aiohttp import web
from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend.workbench.local.http_proxy import HttpProxy, signature_of

_REGION = "us-east-1"
_KINDS = {"CodeBuild_20161006": "codebuild", "Logs_20140328": "logs"}
_PROJECT = (
    "name", "description", "source", "artifacts", "environment", "serviceRole", "timeoutInMinutes",
    "queuedTimeoutInMinutes", "tags",
)  # fmt: skip
_REQUIRED = frozenset({"name", "source", "artifacts", "environment", "serviceRole"})


class Refusal(Exception):
    """An error of the service."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class CodeBuildFaults:
    """What goes wrong. Counts are of the next calls."""

    throttled: int = 0
    """Calls of any kind that are refused with ThrottlingException."""
    role_unknown: int = 0
    """Calls that create or change a project and find that its role cannot be assumed."""
    invisible: int = 1
    """Calls of BatchGetBuilds that do not find a new build."""
    max_builds: int = 1
    """Builds that may run at a time."""
    minute_s: float = 60.0
    """The length of a minute of a project's timeout."""


@dataclass
class _Build:
    id: str
    project: dict[str, Any]
    environment: dict[str, str]
    source: str
    status: str = "IN_PROGRESS"
    phase: str = "QUEUED"
    failure: str = ""
    hidden: int = 0
    log: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, Any]:
        phases = [{"phaseType": "SUBMITTED", "phaseStatus": "SUCCEEDED"}]
        if self.failure:
            contexts = [{"statusCode": "COMMAND_EXECUTION_ERROR", "message": self.failure}]
            phases.append({"phaseType": self.phase, "phaseStatus": self.status, "contexts": contexts})  # type: ignore[dict-item]
        stream = {"groupName": f"/aws/codebuild/{self.project['name']}", "streamName": self.id.partition(":")[2]}
        return {
            "id": self.id,
            "buildStatus": self.status,
            "buildComplete": self.status != "IN_PROGRESS",
            "currentPhase": self.phase if self.status == "IN_PROGRESS" else "COMPLETED",
            "phases": phases,
            "logs": stream if self.log else {},
        }


class CodeBuildEmulator(HttpProxy):
    """An async context manager. `builds` holds every build that was started, by its id."""

    def __init__(self, s3_url: str, *, environ: Mapping[str, str], role: str) -> None:
        super().__init__()
        self.faults = CodeBuildFaults()
        self.projects: dict[str, dict[str, Any]] = {}
        self.builds: dict[str, _Build] = {}
        self._s3_url = s3_url
        self._environ = dict(environ)
        self._role = role
        self._tokens: dict[str, str] = {}  # of StartBuild's idempotency, to the id of the build

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(self._end(build, "STOPPED") for build in self.builds.values()))
        await super().__aexit__(*exc_info)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        service, _, operation = request.headers.get("X-Amz-Target", "").partition(".")
        try:
            signature = signature_of(request)
            if signature is None or _KINDS.get(service) != signature.service:
                raise Refusal("UnrecognizedClientException", "the call is not signed for this service")
            if self.faults.throttled:
                self.faults.throttled -= 1
                raise Refusal("ThrottlingException", "Rate exceeded")
            return web.json_response(
                await self._answer(operation, json.loads(await request.read())),
                content_type="application/x-amz-json-1.1",
            )
        except Refusal as error:
            body = {"__type": error.code, "message": str(error)}
            return web.json_response(body, status=400, content_type="application/x-amz-json-1.1")

    async def _answer(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "BatchGetProjects":
                found = [self.projects[name] for name in asked["names"] if name in self.projects]
                missing = [name for name in asked["names"] if name not in self.projects]
                return {"projects": found, "projectsNotFound": missing}
            case "CreateProject":
                if asked["name"] in self.projects:
                    raise Refusal("ResourceAlreadyExistsException", f"Project already exists: {asked['name']}")
                return {"project": self._set_project(asked)}
            case "UpdateProject":
                self._project(asked["name"])
                return {"project": self._set_project(asked)}
            case "DeleteProject":
                self.projects.pop(asked["name"], None)  # a missing one is no error
                return {}
            case "StartBuild":
                return {"build": self._start(asked).describe()}
            case "BatchGetBuilds":
                return self._describe_builds(asked["ids"])
            case "StopBuild":
                build = self._build(asked["id"])
                await self._end(build, "STOPPED")
                return {"build": build.describe()}
            case "GetLogEvents":
                return {"events": self._events(asked)}
        raise Refusal("InvalidInputException", f"no operation {operation}")

    # --- projects -----------------------------------------------------------------------------------------

    def _project(self, name: str) -> dict[str, Any]:
        if name not in self.projects:
            raise Refusal("ResourceNotFoundException", f"Project cannot be found: {name}")
        return self.projects[name]

    def _set_project(self, asked: dict[str, Any]) -> dict[str, Any]:
        if missing := _REQUIRED - asked.keys():
            raise Refusal("InvalidInputException", f"Project {sorted(missing)} is required")
        environment = asked["environment"]
        if environment["type"] != "ARM_CONTAINER" or "aarch64" not in environment["image"]:
            raise Refusal("InvalidInputException", "the image and the type of the environment do not belong together")
        if asked["serviceRole"] != self._role or self.faults.role_unknown:
            self.faults.role_unknown = max(0, self.faults.role_unknown - 1)
            raise Refusal(
                "InvalidInputException",
                f"CodeBuild is not authorized to perform: sts:AssumeRole on {asked['serviceRole']}",
            )
        project = {key: asked[key] for key in _PROJECT if key in asked}
        project["environment"] = {"environmentVariables": [], "imagePullCredentialsType": "CODEBUILD"} | environment
        project["cache"] = {"type": "NO_CACHE"}
        self.projects[asked["name"]] = project
        return project

    # --- builds -------------------------------------------------------------------------------------------

    def _build(self, build_id: str) -> _Build:
        if build_id not in self.builds:
            raise Refusal("ResourceNotFoundException", f"Build {build_id} was not found")
        return self.builds[build_id]

    def _start(self, asked: dict[str, Any]) -> _Build:
        project = self._project(asked["projectName"])
        token = asked.get("idempotencyToken", uuid4().hex)
        if token in self._tokens:
            return self.builds[self._tokens[token]]
        running = sum(build.status == "IN_PROGRESS" for build in self.builds.values())
        if running >= self.faults.max_builds:
            text = f"Cannot have more than {self.faults.max_builds} builds in queue for the account"
            raise Refusal("AccountLimitExceededException", text)
        build = _Build(
            f"{project['name']}:{uuid4()}",
            project,
            {each["name"]: each["value"] for each in asked.get("environmentVariablesOverride", ())},
            asked.get("sourceLocationOverride", project["source"]["location"]),
            hidden=self.faults.invisible,
        )
        self._tokens[token] = build.id
        self.builds[build.id] = build
        build.task = asyncio.create_task(self._run(build))
        return build

    def _describe_builds(self, ids: list[str]) -> dict[str, Any]:
        found, missing = [], []
        for build_id in ids:
            build = self.builds.get(build_id)
            if build is None or build.hidden:
                missing.append(build_id)
            else:
                found.append(build.describe())
            if build is not None:
                build.hidden = max(0, build.hidden - 1)
        return {"builds": found, "buildsNotFound": missing}

    def _events(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        for build in self.builds.values():
            place = build.describe()["logs"]
            if (place.get("groupName"), place.get("streamName")) == (asked["logGroupName"], asked["logStreamName"]):
                now = int(time.time() * 1000)
                return [
                    {"timestamp": now, "message": f"{line}\n"} for line in build.log[-asked.get("limit", 10_000) :]
                ]
        raise Refusal("ResourceNotFoundException", "The specified log stream does not exist.")

    async def _end(self, build: _Build, status: str) -> None:
        if build.task is not None and not build.task.done():
            build.task.cancel()
            await asyncio.wait([build.task])
        if build.status == "IN_PROGRESS":
            build.status = status

    async def _run(self, build: _Build) -> None:
        limit_s = build.project.get("timeoutInMinutes", 60) * self.faults.minute_s
        with tempfile.TemporaryDirectory(prefix="codebuild-") as folder:
            try:
                async with asyncio.timeout(limit_s):
                    build.phase = "DOWNLOAD_SOURCE"
                    await self._download(build, Path(folder))
                    build.phase = "BUILD"
                    await self._execute(build, Path(folder))
            except TimeoutError:
                build.status, build.failure = "TIMED_OUT", "Build timed out."
            except Refusal as error:
                build.status, build.failure = "FAILED", str(error)
            else:
                build.status = "SUCCEEDED"

    async def _download(self, build: _Build, folder: Path) -> None:
        bucket, _, key = build.source.partition("/")
        try:
            data = await asyncio.to_thread(self._read, bucket, key)
            zipfile.ZipFile(io.BytesIO(data)).extractall(folder)  # names cannot lead out of the folder
        except (BotoCoreError, ClientError, zipfile.BadZipFile) as error:
            raise Refusal("CLIENT_ERROR", f"{error} for primary source and source version") from None

    def _read(self, bucket: str, key: str) -> bytes:
        make: Any = boto3.client  # its types list every service by name
        keys = {"aws_access_key_id": "builder", "aws_secret_access_key": "builder"}
        s3 = make("s3", region_name=_REGION, endpoint_url=self._s3_url, **keys)
        try:
            return bytes(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        finally:
            s3.close()

    async def _execute(self, build: _Build, folder: Path) -> None:
        spec = yaml.safe_load(build.project["source"]["buildspec"])
        if spec.get("version") != 0.2:
            raise Refusal("YAML_FILE_ERROR", "Invalid buildspec version found")
        for command in spec["phases"]["build"]["commands"]:
            build.log.append(f"[Container] Running command {command}")
            # Not by asyncio, which leaves pipes open if it is cancelled while it starts a process.
            process = subprocess.Popen(
                command,
                shell=True,
                cwd=folder,
                env={**self._environ, **build.environment, "AWS_DEFAULT_REGION": _REGION},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            following = asyncio.ensure_future(asyncio.to_thread(self._follow, process, build.log))
            try:
                code = await asyncio.shield(following)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await following
            if code:
                raise Refusal(
                    "COMMAND_EXECUTION_ERROR", f"Error while executing command: {command}. Reason: exit status {code}"
                )

    @staticmethod
    def _follow(process: subprocess.Popen[str], log: list[str]) -> int:
        with process:
            assert process.stdout is not None
            log.extend(line.rstrip() for line in process.stdout)
        return process.returncode
