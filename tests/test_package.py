"""The distribution: what it declares, and what works where only the wheel is installed, in an empty folder."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rollout_backend
from rollout_backend.base.child_process import find_uv

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
PYTHONS = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]

# --- what it declares -------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "PIL": "pillow",
    "opentelemetry": "opentelemetry-sdk",
    "transfer_queue": "transferqueue",
    "yaml": "pyyaml",
}
FOLDERS = {  # and modules, with the extra that they need; those that are not here need `trainer`
    "agent_wrapper": "agent",
    "rollout_backend/workbench/deploy": "deploy",
    "rollout_backend/workbench/local": "local",
    "rollout_backend/model/relay": "relay",
    "rollout_backend/views/inspect_logs.py": "inspect",
    "rollout_backend/testing": "local",
    "rollout_backend/base/tracing.py": "otel",
    "rollout_backend/training/tinker.py": "tinker",
    "rollout_backend/verl": "verl",
}
ELSEWHERE = {
    "bedrock_agentcore": ("agent_wrapper/bedrock_agentcore.py",),  # of the agent
    "langchain_aws": ("agent_wrapper/model_calls.py",),  # of the agent
    "openai": ("rollout_backend/workbench/local/demo/",),  # of the agent, a link but in an archive
    "pytest": ("rollout_backend/workbench/local", "rollout_backend/testing"),  # which runs these modules
    "strands": ("agent_wrapper/model_calls.py",),  # of the agent
    "torch": (
        "rollout_backend/workbench/local/tiny_model.py",
        "rollout_backend/model/serving",
        "rollout_backend/manager.py",
        "rollout_backend/testing/forward_pass.py",
    ),  # of the engine, or of the caller
    "vllm": ("rollout_backend/verl",),  # verl's choice of an engine
}


@functools.cache
def declared(extra: str) -> set[str]:
    """Return the distributions that an extra names, and the extras in it."""
    found = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]}
    for each in map(Requirement, PROJECT["optional-dependencies"][extra]):
        found |= set().union(*map(declared, each.extras)) if each.name == NAME else {canonicalize_name(each.name)}
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level modules that are imported at run time, anywhere in a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        yield from (name.partition(".")[0] for name in names)
        yield from imported(node)


def undeclared(place: str, source: str) -> set[str]:
    """Return what a module imports and its extra does not name."""
    folder = next((each for each in sorted(FOLDERS, reverse=True) if f"{place}/".startswith(f"{each}/")), "")
    known = declared(FOLDERS.get(folder, "trainer"))
    own = {"agent_wrapper", "rollout_backend", *sys.stdlib_module_names}
    return {
        name
        for name in imported(ast.parse(source))
        if name not in own
        and canonicalize_name(DISTRIBUTIONS.get(name, name)) not in known
        and not place.startswith(ELSEWHERE.get(name, ()))
    }


def test_every_direct_import_is_declared_by_the_extra_that_needs_it() -> None:
    modules = [path for package in ("agent_wrapper", "rollout_backend") for path in (ROOT / package).rglob("*.py")]
    places = {str(path.relative_to(ROOT)): path for path in modules if "templates" not in path.parts}
    found = {place: names for place, path in places.items() if (names := undeclared(place, path.read_text()))}
    assert found == {}


def test_the_version_is_that_of_the_distribution() -> None:
    assert rollout_backend.__version__ == PROJECT["version"]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(PYTHONS[0])


def test_the_description_has_no_link_that_leads_nowhere_outside_the_repository() -> None:
    assert not re.search(r"\]\((?!https?:)|src=", PROJECT["readme"]["text"])


# --- what works where only the wheel is installed ---------------------------------------------------------


class Installed:
    """An environment outside the checkout, with an empty folder to work in."""

    def __init__(self, folder: Path, python: str) -> None:
        self.work, self.programs = folder / "work", folder / "venv" / "bin"
        self.work.mkdir(parents=True)
        self.environ = {
            "HOME": str(folder),
            "PATH": f"{self.programs}{os.pathsep}{os.defpath}",
            "NO_COLOR": "1",
            **{name: os.environ[name] for name in os.environ if name.startswith(("UV_", "PIP_", "SSL_"))},
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_CACHE_DIR": uv("cache", "dir"),
        }
        uv("venv", "--quiet", "--python", python, str(folder / "venv"))

    def install(self, *arguments: str) -> None:
        uv("pip", "install", "--quiet", "--python", str(self.programs / "python"), *arguments)

    def run(self, *command: str, code: int = 0, environ: Mapping[str, str] | None = None) -> str:
        """Run a command of this environment in the empty folder. Return its output."""
        done = subprocess.run(
            [str(self.programs / command[0]), *command[1:]],
            cwd=self.work,
            env=self.environ | dict(environ or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{command}: {done.stdout}"
        return done.stdout

    def check(self) -> None:
        """Import every module that needs no engine, and run the scripted demo."""
        self.run("python", "-c", IMPORT_ALL)
        assert "64 of 64 rollouts completed" in self.run("rollout", "demo", "--scripted")


IMPORT_ALL = """
import importlib, pkgutil
import agent_wrapper, rollout_backend
OPTIONAL = {"bedrock_agentcore", "inspect_ai", "pytest", "sglang", "torch", "verl"}
for package in (agent_wrapper, rollout_backend):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name in OPTIONAL, (module.name, error.name)
"""


def uv(*arguments: str) -> str:
    done = subprocess.run([find_uv(), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if "Failed to fetch" in done.stderr or "Could not connect" in done.stderr:
        pytest.skip(f"no package index answers: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", str(folder), str(ROOT))
    return folder


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> str:
    [file] = distributions.glob("*.whl")
    return str(file)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wheel_works_in_an_empty_folder(wheel: str, tmp_path: Path) -> None:
    here = Installed(tmp_path, sys.executable)
    pins = ("--constraint", str(ROOT / "constraints" / "dev.txt"))
    here.install(*pins, f"{NAME}[deploy] @ file://{wheel}", "pytest", "pytest-asyncio")
    here.check()
    here.run("rollout", "init", "my-agent", "--template", "command")
    here.install(*pins, "--requirement", str(here.work / "my-agent" / "requirements.txt"))
    here.run("python", "-m", "pytest", "-q", "my-agent")
    try:
        assert "wrote rollout.yaml" in here.run("rollout", "deploy", "my-agent", "--local")
        here.run("rollout", "run", "rollout.yaml", "--tasks", "my-agent/tasks.jsonl", "--limit", "1")
    finally:
        here.run("rollout", "down", "rollout.yaml", "--yes")
    here.run("rollout", "infra")
    assert (here.work / "infra" / "template.yaml").read_text() == (ROOT / "infra" / "template.yaml").read_text()
    aws = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "us-east-1"}
    aws |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    refused = here.run("rollout", "deploy", "my-agent", "--stack", "my-stack", code=2, environ=aws)
    assert "stack my-stack cannot be reached" in refused
    (here.programs / "uv").unlink()
    (here.programs / "uv").write_text('#!/bin/sh\nfor last; do :; done; grep sglang== "$last"; exit 9\n')
    (here.programs / "uv").chmod(0o755)
    assert "sglang==" in here.run("rollout", "engine", "install", code=1)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_works_on_each_supported_python(python: str, wheel: str, tmp_path: Path) -> None:
    known = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    program = str(known[-1]) if known else shutil.which(f"python{python}")  # pyenv's shim may run none
    if program is None:
        pytest.skip(f"Python {python} is not installed")
    here = Installed(tmp_path, program)
    here.install(f"{NAME}[deploy,otel,smg] @ file://{wheel}")
    here.check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_lowest_versions_that_are_declared_work(wheel: str, tmp_path: Path) -> None:
    here = Installed(tmp_path / "all", sys.executable)
    here.install("--resolution", "lowest-direct", f"{NAME}[deploy,otel,smg] @ file://{wheel}")
    here.check()
    for extra in ("agent", "relay"):
        alone = Installed(tmp_path / extra, sys.executable)
        alone.install("--resolution", "lowest-direct", f"{NAME}[{extra}] @ file://{wheel}")
        if extra == "relay":
            alone.run("rollout", "relay", "--help")
        else:
            alone.run("python", "-c", "import agent_wrapper.exec")
        assert "pip install '.[trainer]'" in alone.run("rollout", "ls", code=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_training_side_needs_no_other_extra(wheel: str, tmp_path: Path) -> None:
    here = Installed(tmp_path, sys.executable)
    pins = str(ROOT / "constraints" / "trainer.txt")
    here.install("--constraint", pins, f"{NAME}[trainer] @ file://{wheel}")
    here.run("python", "-c", "import rollout_backend.manager, rollout_backend.run.checks.examination")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
@pytest.mark.release
def test_every_extra_can_be_resolved_with_its_lowest_versions(extra: str) -> None:
    lowest = ("--resolution", "lowest-direct", "--python-version", PYTHONS[0])
    uv("pip", "compile", "pyproject.toml", "--extra", extra, *lowest)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1200)
def test_the_source_distribution_runs_its_own_tests(distributions: Path, tmp_path: Path) -> None:
    [archive] = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/docs", "tests/test_structure.py"]
    argv += [
        "tests/infra/test_template.py",
        "tests/workbench/deploy/test_image.py",
        "tests/test_package.py",
        "-m",
        "not slow",
    ]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_test_writes_a_run_into_the_clone():
    with pytest.raises(AssertionError, match="is among the user's runs"):
        (Path(__file__).parents[1] / "runs" / "of-a-test").mkdir(parents=True)
