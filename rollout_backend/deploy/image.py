"""Build an agent's image with docker or podman on this machine, and push it to the stack's repository."""

import asyncio
import base64
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend import aws
from rollout_backend.deploy import INFRA
from rollout_backend.deploy.package import write_wrapper_context
from rollout_backend.deploy.target import Target
from rollout_backend.errors import ConfigError, PreflightError

DOCKERFILE = INFRA / "agent.Dockerfile"
CODEBUILD = "codebuild"


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
    password = await _registry_password(target)
    registry = target.repository.partition("/")[0]
    await _run([builder, "login", "--username", "AWS", "--password-stdin", registry], password)
    echo(f"building {image}")
    with tempfile.TemporaryDirectory(prefix="rollout-deploy-") as scratch:
        dockerfile = _dockerfile(folder, Path(scratch))
        options = ["--platform", "linux/arm64", "--file", str(dockerfile), "--tag", image]
        write_wrapper_context(Path(scratch) / "wrapper")
        options += ["--build-context", f"wrapper={scratch}/wrapper"]
        if builder == "docker":
            await _run(["docker", "buildx", "build", "--provenance=false", "--push", *options, str(folder)])
        else:
            await _run([builder, "build", *options, str(folder)])
            await _run([builder, "push", image])
    return image


def new_image(target: Target) -> str:
    """Return a name for the next image, with an unused tag."""
    return f"{target.repository}:{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def _dockerfile(folder: Path, scratch: Path) -> Path:
    """Return the folder's own Dockerfile, or the default one plus the patterns of the folder's .dockerignore."""
    if (folder / "Dockerfile").is_file():
        return folder / "Dockerfile"
    ignored = DOCKERFILE.with_name(f"{DOCKERFILE.name}.dockerignore").read_text()
    own = folder / ".dockerignore"  # Docker ignores it if the Dockerfile has its own
    (scratch / "Dockerfile.dockerignore").write_text(ignored + (f"\n{own.read_text()}" if own.is_file() else ""))
    shutil.copy(DOCKERFILE, scratch / "Dockerfile")
    return scratch / "Dockerfile"


async def _registry_password(target: Target) -> str:
    try:
        async with aws.client("ecr", region=target.region, endpoint_url=target.endpoint_url, retries=4) as client:
            answer = await client.get_authorization_token()
    except (ClientError, BotoCoreError) as error:
        raise aws.preflight_error(error, "the image registry", "--build") from error
    token = answer["authorizationData"][0]["authorizationToken"]
    return base64.b64decode(token).decode().partition(":")[2]


async def _run(argv: Sequence[str], stdin: str | None = None) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL
    )
    try:
        await process.communicate(stdin.encode() if stdin is not None else None)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise PreflightError(f"{' '.join(argv[:3])} failed with code {process.returncode}: its output is above")
