"""Building an agent's image, with a builder that only notes how it was called, and a registry's login."""

import base64
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from builders import served
from rollout_backend.errors import ConfigError, PreflightError
from rollout_backend.workbench.deploy.image import check_builder, push_image
from rollout_backend.workbench.deploy.package import write_wrapper_context
from rollout_backend.workbench.deploy.target import Target

ROOT = Path(__file__).parents[3]
REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/my-agent"
BUILDER = """#!{python} -IS
import pathlib, sys
argv = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*argv, file=log)
if "--password-stdin" in argv:
    sys.exit(sys.stdin.read() != "secret")
if "--file" in argv:
    ignored = pathlib.Path(argv[argv.index("--file") + 1] + ".dockerignore")
    pathlib.Path({log!r} + ".ignored").write_text(ignored.read_text() if ignored.is_file() else "")
sys.exit({code})
"""


class Builder:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.agent = folder / "agent"
        self.agent.mkdir()
        (self.agent / "agent.py").write_text("")
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.fail(0)

    def fail(self, code: int) -> None:
        for name in ("docker", "podman"):
            program = self.programs / name
            program.write_text(BUILDER.format(python=sys.executable, log=str(self.log), code=code))
            program.chmod(0o755)

    def ignored(self) -> list[str]:
        return Path(f"{self.log}.ignored").read_text().splitlines()

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_keys: None) -> Builder:
    made = Builder(tmp_path)
    monkeypatch.setenv("PATH", str(made.programs))
    return made


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    token = base64.b64encode(b"AWS:secret").decode()

    async def login(_: web.Request) -> web.Response:
        return web.json_response({"authorizationData": [{"authorizationToken": token}]})

    async with served(login) as url:
        yield Target("us-east-1", "bucket", "rollout_my_agent", repository=REPOSITORY, endpoint_url=url)


async def test_docker_builds_for_arm64_and_pushes_with_the_folders_own_patterns(builder, target):
    (builder.agent / ".dockerignore").write_text("notes\n!root.pem\n")
    image = await push_image("docker", builder.agent, target, lambda text: None)
    login, build = builder.calls()
    assert login == f"login --username AWS --password-stdin {REPOSITORY.partition('/')[0]}"
    assert image.startswith(f"{REPOSITORY}:20")
    assert build.startswith("buildx build --provenance=false --push --platform linux/arm64 --file ")
    assert f"--tag {image} --build-context wrapper=" in build
    ignored = builder.ignored()
    assert "**/.env*" in ignored
    assert ignored[-2:] == ["notes", "!root.pem"]


async def test_podman_pushes_separately_and_a_folders_own_dockerfile_is_used(builder, target):
    own = builder.agent / "Dockerfile"
    own.write_text("FROM scratch\n")
    image = await push_image("podman", builder.agent, target, lambda text: None)
    _, build, push = builder.calls()
    assert f"--file {own} " in build
    assert push == f"push {image}"


async def test_a_build_that_fails_stops_the_deployment(builder, target):
    builder.fail(7)
    with pytest.raises(PreflightError, match="docker buildx build failed with code 7"):
        await push_image("docker", builder.agent, target, lambda text: None)


def test_the_wrappers_context_has_what_the_dockerfiles_copy_from_it(tmp_path):
    write_wrapper_context(tmp_path / "wrapper")
    own, real = (tomllib.loads((path / "pyproject.toml").read_text()) for path in (tmp_path / "wrapper", ROOT))
    needed = real["project"]["dependencies"] + real["project"]["optional-dependencies"]["agent"]
    assert sorted(own["project"]["dependencies"]) == sorted(needed)
    assert own["project"]["entry-points"] == real["project"]["entry-points"]
    assert (tmp_path / "wrapper" / "constraints" / "agent.txt").read_text() == (
        ROOT / "constraints" / "agent.txt"
    ).read_text()
    assert (tmp_path / "wrapper" / "agent_wrapper" / "contract" / "keys.py").is_file()
    assert (tmp_path / "wrapper" / "README.md").is_file()


def test_a_missing_builder_is_named_before_anything_starts(builder):
    check_builder("podman")
    (builder.programs / "podman").unlink()
    with pytest.raises(ConfigError, match="there is no podman on this machine"):
        check_builder("podman")
