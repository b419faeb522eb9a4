"""The images, without a builder: what COPY takes, which versions pip may install, pytest inside an agent's image."""

import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from rollout_backend.agents.runtimes.kubernetes.manifests import AGENT_FOLDER

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "infra" / "agent.Dockerfile"
AGENTS = [AGENT, *sorted((ROOT / "examples").glob("*/Dockerfile"))]
NAMES = [str(path.relative_to(ROOT)) for path in AGENTS]
PYTHON_AGENTS = [path for path in AGENTS if path.parent.name != "node_agent"]


def instructions(dockerfile: Path) -> list[list[str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M))
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


def copies(dockerfile: Path, source: str | None) -> list[tuple[list[str], str]]:
    """What COPY takes from the context of this name, and where it goes; None is the agent's folder."""
    found = []
    for name, *words in instructions(dockerfile):
        if name != "COPY":
            continue
        options = [word for word in words if word.startswith("--")]
        *paths, target = words[len(options) :]
        if (f"--from={source}" in options) if source else not options:
            found.append((paths, target))
    return found


def test_the_images_of_agents_take_the_same_files() -> None:
    assert copies(AGENT, None) == [(["."], ".")]
    dockerfile = ROOT / "infra" / "harbor-agent.Dockerfile"
    assert copies(dockerfile, None) == [(["."], f"{AGENT_FOLDER}/files")]
    taken = {path: target for paths, target in copies(dockerfile, "wrapper") for path in paths}
    assert all((ROOT / path).exists() for path in taken)
    assert taken.keys() == {path for paths, _ in copies(AGENT, "wrapper") for path in paths}
    assert copies(dockerfile, "build") == [([AGENT_FOLDER], AGENT_FOLDER)]
    ignored = dockerfile.with_name("harbor-agent.Dockerfile.dockerignore")
    assert ignored.read_text() == AGENT.with_name("agent.Dockerfile.dockerignore").read_text()


@pytest.mark.parametrize("dockerfile", AGENTS[1:], ids=NAMES[1:])
def test_an_examples_image_names_each_file_that_it_takes(dockerfile: Path) -> None:
    for paths, _ in copies(dockerfile, None):
        for path in paths:
            assert (dockerfile.parent / path).is_file(), path


@pytest.mark.parametrize("dockerfile", PYTHON_AGENTS)
def test_the_wrapper_is_installed_at_pinned_versions(dockerfile: Path) -> None:
    taken = {path: target for paths, target in copies(dockerfile, "wrapper") for path in paths}
    assert set(taken) == {"pyproject.toml", "README.md", "constraints/agent.txt", "agent_wrapper"}
    assert all((ROOT / path).exists() for path in taken)
    (install,) = [words for words in instructions(dockerfile) if "/wrapper" in words]
    assert install[install.index("--requirement") + 1] == taken["constraints/agent.txt"] + "agent.txt"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "dockerfile", [AGENT, *(pytest.param(path, marks=pytest.mark.release) for path in PYTHON_AGENTS[1:])]
)
def test_the_installs_of_an_agents_image_work(dockerfile: Path, tmp_path: Path) -> None:
    """The pip lines of a Dockerfile, in a new environment; then pytest and the agent's import."""
    environment, wrapper = tmp_path / "venv", tmp_path / "wrapper"
    venv.create(environment, with_pip=True)
    for paths, _ in copies(dockerfile, "wrapper"):
        for path in paths:
            target = wrapper / Path(path).name
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, target)
            else:
                wrapper.mkdir(exist_ok=True)
                shutil.copy(ROOT / path, target)
    folder = dockerfile.parent if dockerfile != AGENT else ROOT / "examples" / "arithmetic"
    for name, *words in instructions(dockerfile):
        if name != "RUN" or "pip" not in words:
            continue
        line = " ".join(words)
        line = line.replace("/wrapper", str(wrapper)).replace("pip ", f"{environment}/bin/pip ")
        done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, check=False)
        if "Failed to establish a new connection" in done.stderr:
            pytest.skip(f"no package index answers: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "pytest"], check=True)
    imports = subprocess.run([python, "-c", "import agent"], cwd=folder, capture_output=True, text=True, check=False)
    assert imports.returncode == 0, imports.stderr
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    done = subprocess.run([python, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
