"""`rollout init`: a new agent, from a template."""

import shlex
import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_backend.cli.common import console, exit_codes
from rollout_backend.errors import ConfigError

TEMPLATES = Path(__file__).parents[1] / "local" / "templates"
_COMMON = "common"  # files that all templates share; a template can replace them

Template = Literal["openai", "strands", "pydantic-ai", "command"]


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the agent, new or empty.")],
    template: Annotated[
        Template, typer.Option(help="The agent's framework; `command` runs a program in any language.")
    ] = "openai",
) -> None:
    """Create an agent from a template: its code and test, tasks, settings and Dockerfile."""
    with exit_codes():
        _copy(template, folder)
        place = shlex.quote(str(folder))
        for line in (
            f"{folder} holds an agent ({template}): {', '.join(sorted(path.name for path in folder.iterdir()))}",
            "Next:",
            f"  cd {place} && pip install -r requirements.txt pytest",
            "  pytest",
            "  rollout dev agent.py",
            "config.yaml is for a run on AWS. This lists what to fill in, and then everything that would stop a run:",
            "  rollout doctor config.yaml --agent agent.py",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _copy(template: Template, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name a new one")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new or an empty folder")
    for source in (_COMMON, template):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TEMPLATES / source, folder, ignore=ignored, dirs_exist_ok=True)
