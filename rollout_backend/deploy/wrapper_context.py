"""Create the build context `wrapper` of an agent's image: the wrapper of this installation, as a separate package.

In a checkout, the checkout itself is this context.
"""

import importlib.metadata
import shutil
from pathlib import Path

import agent_wrapper
from rollout_backend.deploy import CONSTRAINTS
from rollout_backend.deploy.package import requirements

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


def write_wrapper_context(folder: Path) -> None:
    """Write the files that `infra/agent.Dockerfile` copies from the context `wrapper` to a new folder."""
    wrapper = Path(agent_wrapper.__file__).parent
    shutil.copytree(wrapper, folder / wrapper.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "constraints").mkdir()
    shutil.copy(CONSTRAINTS / "agent.txt", folder / "constraints" / "agent.txt")
    (folder / "README.md").touch()
    version = importlib.metadata.version("rollout-backend")
    (folder / "pyproject.toml").write_text(_PYPROJECT.format(version=version, dependencies=requirements()))
