"""Unpack the zip of an agent deployed as code, with AgentCore's checks.

Invariants:

- An agent sees only the packages of its zip and the standard library, and nothing else of this machine.
- A zip is unpacked once, into a folder named after its digest.
"""

import asyncio
import hashlib
import io
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_backend.agents.runtimes.agentcore.provision import (
    MAX_UNPACKED_BYTES,
    MAX_ZIP_BYTES,
    PYTHONS,
    CodeArtifact,
)
from rollout_backend.workbench.local.session_pool import ServiceError

# A container does not have these variables of this machine.
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class BuildFailed(Exception):
    """The runtime cannot be created from its code. The message is the `failureReason`."""


class CodeStore:
    """Agents deployed as code. `env` is the environment of a session."""

    def __init__(
        self, folder: Path, region: str, env: Mapping[str, str], *, max_unpacked_bytes: int = MAX_UNPACKED_BYTES
    ) -> None:
        self._folder = folder
        self._region = region
        self._max_unpacked_bytes = max_unpacked_bytes
        self.env = {name: value for name, value in env.items() if name not in _ENVIRONMENT}

    def check(self, configuration: Mapping[str, Any]) -> None:
        """Raise ServiceError if the service would immediately refuse this `codeConfiguration`."""
        try:
            code = CodeArtifact.read(configuration)
        except (KeyError, TypeError, AttributeError):
            raise ServiceError(
                "ValidationException", "codeConfiguration needs code.s3, runtime, entryPoint"
            ) from None
        if code.python not in PYTHONS:
            raise ServiceError("ValidationException", f"runtime {configuration['runtime']} is not supported")
        if not 1 <= len(code.entry_point) <= 2 or not code.entry_point[-1].endswith(".py"):
            raise ServiceError("ValidationException", f"entryPoint {list(code.entry_point)} names no Python file")

    async def install(self, configuration: Mapping[str, Any]) -> Path:
        """Download and unpack the code. Return the path of its entry point.

        Raises:
            BuildFailed: the object does not exist, or is not a zip that AgentCore could run.
        """
        return await asyncio.to_thread(self._install, CodeArtifact.read(configuration))

    def command(self, script: Path) -> tuple[str, ...]:
        """Return the command that runs an installed agent in its folder, without this machine's packages."""
        start = "import os, runpy, sys; os.chdir(sys.argv[1]); sys.path[0] = sys.argv[1]; "
        run = "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        return (sys.executable, "-S", "-c", start + run, str(script.parent), str(script))

    def _install(self, code: CodeArtifact) -> Path:
        data = self._download(code)
        folder = self._folder / hashlib.sha256(data).hexdigest()[:16]
        if not folder.is_dir():
            unpacked = folder.with_suffix(".part")
            shutil.rmtree(unpacked, ignore_errors=True)
            try:
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    if sum(each.file_size for each in archive.infolist()) > self._max_unpacked_bytes:
                        raise BuildFailed(f"The unzipped code exceeds {self._max_unpacked_bytes} bytes")
                    # `zipfile` removes absolute paths and `..` from names, so no file leaves the folder.
                    archive.extractall(unpacked)
            except zipfile.BadZipFile as error:
                raise BuildFailed(f"{code} is not a zip file: {error}") from None
            unpacked.rename(folder)
        script = folder / code.entry_point[-1]
        if not script.is_file():
            raise BuildFailed(f"The entry point {code.entry_point[-1]} is not in {code}")
        return script

    def _download(self, code: CodeArtifact) -> bytes:
        # boto3 is slow to import, and few agents are deployed as code.
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        # boto3's types have one overload per service name.
        make: Any = boto3.client
        s3 = make(
            "s3",
            region_name=self._region,
            endpoint_url=self.env.get("AWS_ENDPOINT_URL"),
            aws_access_key_id=self.env.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=self.env.get("AWS_SECRET_ACCESS_KEY"),
        )
        try:
            answer = s3.get_object(Bucket=code.bucket, Key=code.key)
            if answer["ContentLength"] > MAX_ZIP_BYTES:
                raise BuildFailed(f"{code} exceeds {MAX_ZIP_BYTES} bytes")
            return bytes(answer["Body"].read())
        except (ClientError, BotoCoreError) as error:
            raise BuildFailed(f"The code cannot be read from {code}: {error}") from None
