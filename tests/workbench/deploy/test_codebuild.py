"""Building an image in CodeBuild: its calls, its faults, and the commands of its buildspec, with a fake docker."""

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rollout_backend.errors import PreflightError
from rollout_backend.workbench.deploy import image as module
from rollout_backend.workbench.deploy.target import Target
from rollout_backend.workbench.local.http_proxy import HttpProxy, signature_of
from tests.emulators.codebuild_emulator import CodeBuildEmulator

ROLE = "arn:aws:iam::000000000000:role/build"
REPOSITORY = "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent"
PROGRAMS = {
    "aws": 'test "$*" = "ecr get-login-password" && echo secret',
    "docker": """
case "$1" in
    login) grep -q secret ;;
    buildx) ls Dockerfile agent wrapper && echo "$@" && {build} ;;
    push) echo "pushed $2" ;;
esac
""",
}


build_image = functools.partial(module.build_image, poll_s=0.02)


class Endpoint(HttpProxy):
    """S3 and CodeBuild at one address."""

    def __init__(self, s3: str, codebuild: str) -> None:
        super().__init__()
        self._upstreams = {"s3": s3, "codebuild": codebuild, "logs": codebuild}

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        signature = signature_of(request)
        assert signature is not None
        return await self._forward(self._upstreams[signature.service], request, await request.read())


def write_programs(folder: Path, build: str) -> dict[str, str]:
    for name, text in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text.replace('{build}', build)}")
        program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text("")
    (folder / ".env").write_text("SECRET=1")
    return folder


@pytest.fixture
async def codebuild(local_aws, tmp_path) -> AsyncIterator[CodeBuildEmulator]:
    programs = tmp_path / "programs"
    programs.mkdir()
    environ = write_programs(programs, "true")
    async with CodeBuildEmulator(local_aws.endpoint_url, environ=environ, role=ROLE) as emulator:
        yield emulator


@pytest.fixture
async def target(local_aws, codebuild) -> AsyncIterator[Target]:
    async with Endpoint(local_aws.endpoint_url, codebuild.url) as endpoint:
        yield Target(
            "us-east-1",
            local_aws.bucket,
            "rollout_my_agent",
            prefix="codebuild/",
            repository=REPOSITORY,
            build_role=ROLE,
            endpoint_url=endpoint.url,
        )


async def test_an_image_is_built_and_pushed_through_throttling_and_a_new_role(agent, codebuild, target):
    codebuild.faults.throttled, codebuild.faults.role_unknown = 1, 1
    told: list[str] = []
    image = await build_image(agent, target, told.append)
    assert image.startswith(f"{REPOSITORY}:20")
    [build] = codebuild.builds.values()
    log = "\n".join(build.log)
    assert f"pushed {image}" in log
    assert "--platform linux/arm64 --load --file Dockerfile" in log
    for name in ("agent.py", "pyproject.toml", "agent_wrapper"):
        assert f"\n{name}\n" in log
    assert ".env" not in log
    assert "creating CodeBuild project rollout_my_agent" in told
    told.clear()
    await build_image(agent, target, told.append)
    assert not any("CodeBuild project" in line for line in told), "an equal project is not changed"
    codebuild.projects["rollout_my_agent"]["timeoutInMinutes"] = 5
    await build_image(agent, target, told.append)
    assert "updating CodeBuild project rollout_my_agent" in told


async def test_a_build_that_fails_shows_the_end_of_its_log(agent, codebuild, target, tmp_path):
    write_programs(tmp_path / "programs", "(echo 'ERROR: no matching distribution' && exit 7)")
    with pytest.raises(PreflightError, match=r"(?s)FAILED in phase BUILD: .*exit status 7.*ERROR: no matching"):
        await build_image(agent, target, lambda text: None)
    assert not any("pushed" in line for build in codebuild.builds.values() for line in build.log)


async def test_a_build_that_never_ends_is_stopped(agent, codebuild, target, tmp_path):
    write_programs(tmp_path / "programs", "sleep 600")
    with pytest.raises(PreflightError, match=r"was stopped: it did not end within 0\.1 s"):
        await build_image(agent, target, lambda text: None, limit_s=0.1)
    building = asyncio.Event()
    deployment = asyncio.create_task(
        build_image(agent, target, lambda text: building.set() if text == "  build" else None)
    )
    await building.wait()
    deployment.cancel()
    await asyncio.wait([deployment])
    assert [build.status for build in codebuild.builds.values()] == ["STOPPED", "STOPPED"]


async def test_what_an_account_refuses_is_named_with_what_to_do(agent, codebuild, target):
    codebuild.faults.max_builds = 0
    with pytest.raises(PreflightError, match=r"more than 0 builds.*raise the quota"):
        await build_image(agent, target, lambda text: None)
    codebuild.projects["rollout_my_agent"]["tags"] = []
    with pytest.raises(PreflightError, match="rollout deploy did not create it"):
        await build_image(agent, target, lambda text: None)
