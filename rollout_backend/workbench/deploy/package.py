"""Pack an agent for AgentCore: the zip that runs as code, with its folder, its packages and the wrapper, and the
wrapper as build context of an image.

Invariants:

- Equal inputs give equal zips, unless a package is compiled, which only happens for this machine.
- The zip contains no file that looks like a secret. The patterns are those of the image's `.dockerignore`.
"""

import asyncio
import hashlib
import importlib.metadata
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agent_wrapper
from rollout_backend.agents.runtimes.agentcore.provision import MAX_UNPACKED_BYTES, MAX_ZIP_BYTES
from rollout_backend.base.child_process import find_uv, run_child
from rollout_backend.base.dockerignore import FilePatterns
from rollout_backend.errors import ConfigError
from rollout_backend.workbench.deploy import CONSTRAINTS, INFRA

ENTRY_POINT = "agent.py"
REQUIREMENTS = "requirements.txt"
DEFAULT_IGNORE = INFRA / "agent.Dockerfile.dockerignore"
_PLATFORM = "aarch64-manylinux2014"
# A zip cannot store an earlier time.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_INSTALL_S = 600.0
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "rollout-backend"
version = "{version}"
dependencies = {dependencies}

[project.optional-dependencies]
agent = []

[project.entry-points.pytest11]
rollout_backend = "agent_wrapper.pytest_plugin"

[tool.setuptools.packages.find]
include = ["agent_wrapper*"]

[tool.setuptools.package-data]
agent_wrapper = ["py.typed"]
"""


@dataclass(frozen=True)
class CodePackage:
    """A zip on this machine. `python` is the Python version that it needs."""

    path: Path
    python: str
    digest: str
    packages: int

    @property
    def size(self) -> int:
        return self.path.stat().st_size


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder does not contain an agent."""
    if not (folder / ENTRY_POINT).is_file():
        raise ConfigError(f"{folder} is not an agent's folder: it has no {ENTRY_POINT}, which ends in app.run()")


async def make_package(
    folder: Path, target: Path, *, native: bool = False, max_unpacked_bytes: int = MAX_UNPACKED_BYTES
) -> CodePackage:
    """Write the zip of an agent's folder to `target`. With `native`, machine code is for this machine, otherwise for
    AgentCore: Linux on arm64.

    Raises:
        ConfigError: a package cannot be installed for the target, or the zip is too large.
    """
    check_folder(folder)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory(prefix="rollout-deploy-") as scratch:
        content = Path(scratch) / "content"
        content.mkdir()
        await _install(folder, content, python, native=native)
        wrapper = Path(agent_wrapper.__file__).parent
        shutil.copytree(wrapper, content / wrapper.name, ignore=shutil.ignore_patterns("__pycache__"))
        copy_agent(folder, content)
        return await asyncio.to_thread(_zip, content, target, python, max_unpacked_bytes)


def requirements() -> list[str]:
    """Return the wrapper's requirements in an agent's container."""
    found = map(Requirement, importlib.metadata.requires("rollout-backend") or [])
    wanted = [each for each in found if each.marker is None or each.marker.evaluate({"extra": "agent"})]
    for each in wanted:
        # The marker names the extra.
        each.marker = None
    return [str(each) for each in wanted]


async def _install(folder: Path, content: Path, python: str, *, native: bool) -> None:
    """Install the packages in the versions of this environment, in which the agent was checked."""
    uv = find_uv()
    own = folder / REQUIREMENTS
    pins = content.with_name("pins.txt")
    pins.write_text("".join(f"{pin}\n" for pin in _pins(own.read_text() if own.is_file() else "")))
    argv = [uv, "pip", "install", "--quiet", "--no-config", "--target", str(content), "--constraint", str(pins)]
    argv += ["--python-version", python, "--python", sys.executable, "--link-mode", "copy"]
    argv += [] if native else ["--python-platform", _PLATFORM]
    argv += [*requirements(), *(["--requirement", str(own)] if own.is_file() else [])]
    try:
        done = await run_child(argv, _INSTALL_S)
    except TimeoutError:
        raise ConfigError(f"the agent's packages were not installed within {_INSTALL_S:g} s") from None
    if done.returncode:
        text, place = done.stderr.decode(errors="replace").strip(), "this machine" if native else "Linux on arm64"
        built = re.search(r"build `([^`]+)`", text)
        what = f"{built[1]} has no wheel" if built else "the agent's packages cannot be installed"
        raise ConfigError(
            f"{what} for {place}. Correct {own}, or build an image, which compiles it: --build codebuild\n{text}"
        )
    # Scripts contain this machine's paths.
    shutil.rmtree(content / "bin", ignore_errors=True)
    (content / ".lock").unlink(missing_ok=True)


def _pins(own: str) -> Iterator[str]:
    """Yield the versions of this environment, except those that the agent's requirements determine."""
    decided = {canonicalize_name(name) for name in re.findall(r"^\s*([A-Za-z0-9][\w.-]*)", own, flags=re.M)}
    for name, version in sorted({(each.name, each.version) for each in importlib.metadata.distributions()}):
        if "+" not in version and canonicalize_name(name) not in decided | {"rollout-backend"}:
            yield f"{name}=={version}"


def copy_agent(folder: Path, content: Path) -> None:
    """Copy the files of an agent's folder, except ignored ones."""
    ignored = FilePatterns(ignore_lines(folder))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and PurePosixPath(name) not in ignored:
            (content / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, content / name)


def ignore_lines(folder: Path) -> list[str]:
    """Return the lines of the default `.dockerignore`, then those of the folder's own."""
    own = folder / ".dockerignore"
    files = [DEFAULT_IGNORE, *([own] if own.is_file() else [])]
    return [line for file in files for line in file.read_text("utf-8-sig").splitlines()]


def write_zip(content: Path, target: Path) -> str:
    """Write the zip of a folder; equal files give equal zips. Return its digest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files(content):
            info = zipfile.ZipInfo(path.relative_to(content).as_posix(), _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if path.stat().st_mode & 0o100 else 0o644) << 16
            archive.writestr(info, path.read_bytes())
    return hashlib.sha256(target.read_bytes()).hexdigest()[:16]


def _files(content: Path) -> list[Path]:
    return [path for path in sorted(content.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def _zip(content: Path, target: Path, python: str, max_unpacked_bytes: int) -> CodePackage:
    unpacked = sum(path.stat().st_size for path in _files(content))
    digest = write_zip(content, target)
    size = target.stat().st_size
    if size > MAX_ZIP_BYTES or unpacked > max_unpacked_bytes:
        raise ConfigError(
            f"the agent's zip has {size:,} bytes, and {unpacked:,} unpacked; AgentCore accepts {MAX_ZIP_BYTES:,} and "
            f"{max_unpacked_bytes:,}. Leave packages out of {REQUIREMENTS}, or build an image: --build codebuild"
        )
    packages = len(list(content.glob("*.dist-info")))
    return CodePackage(target, python, digest, packages)


def write_wrapper_context(folder: Path) -> None:
    """Write the files that `infra/agent.Dockerfile` copies from the context `wrapper` to a new folder: the wrapper of
    this installation, as a separate package. In a checkout, the checkout itself is this context."""
    wrapper = Path(agent_wrapper.__file__).parent
    shutil.copytree(wrapper, folder / wrapper.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "constraints").mkdir()
    shutil.copy(CONSTRAINTS / "agent.txt", folder / "constraints" / "agent.txt")
    (folder / "README.md").touch()
    version = importlib.metadata.version("rollout-backend")
    (folder / "pyproject.toml").write_text(_PYPROJECT.format(version=version, dependencies=requirements()))
