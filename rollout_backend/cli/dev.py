"""Commands for the author of an agent: `rollout init` makes one from a template, and `rollout dev` runs it on
this machine, again after each change."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeGuard

import typer

from rollout_backend.cli.common import Overrides, console, echo
from rollout_backend.cli.local_model import load_local_config, local_model
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError, TaskFileError

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task

TEMPLATES = Path(__file__).parents[1] / "local" / "templates"
_COMMON = "common"  # files that all templates share; a template can replace them

Template = Literal["openai", "strands", "pydantic-ai", "command"]
_TASKS = "tasks.jsonl"


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the agent, new or empty.")],
    template: Annotated[
        Template, typer.Option(help="The agent's framework; `command` runs a program in any language.")
    ] = "openai",
) -> None:
    """Create an agent from a template: its code and test, tasks, settings and Dockerfile."""
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
        echo(line)


def _copy(template: Template, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name a new one")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new or an empty folder")
    for source in (_COMMON, template):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TEMPLATES / source, folder, ignore=ignored, dirs_exist_ok=True)


async def dev(
    app: Annotated[Path, typer.Argument(help="Python file that starts the agent's app.")],
    tasks: Annotated[
        Path | None,
        typer.Option(help=f"JSONL or parquet with tasks, or harbor:FOLDER. Default: {_TASKS} in the agent's folder."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="ID|JSON", help="Task id, or a payload in JSON. Default: the first task."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Run the first N tasks, one after the other.")] = 1,
    engine: Annotated[
        bool, typer.Option("--engine", help="Use a small model on the CPU instead of a script.")
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this running SGLang or vLLM server.")
    ] = None,
    override: Overrides = None,
) -> int:
    """Run an agent on one task, show each of its model calls as it happens, and run it again after each change of its
    source.

    A script answers instead of a model, unless you name one with --engine or --endpoint. The agent runs on a local S3
    and AgentCore, as in `rollout demo`. A Harbor task is scored by its tests. An error shows the traceback of the
    agent's own files. Press Ctrl-C to stop.
    """
    from rollout_backend.core.harbor import fit_to_runtime
    from rollout_backend.local.dev import DevRunner, run_after_changes, source_changes
    from rollout_backend.local.harness import AgentHarness

    if engine and endpoint is not None:
        raise ConfigError("--engine starts a server: leave out --engine or --endpoint")
    if task is not None and limit > 1:
        raise ConfigError("--task names one task: leave out --task or --limit")
    if not app.is_file() or app.suffix != ".py":
        raise ConfigError(f"there is no agent at {app}: name the Python file that starts its app")
    app = app.absolute()
    file = tasks if _is_harbor(tasks) else (tasks or app.parent / _TASKS).absolute()
    find_tasks(file, task, limit)  # refuse an invalid file now; it is read again after each change

    def show(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="rollout-dev-") as folder:
        async with local_model(not engine and endpoint is None, endpoint, 1, show) as model:
            base = {"sampling": {"temperature": 1.0, "max_tokens": 512}, "timeouts": {"agent_s": 600}, **model}
            settings = load_local_config(None, override or [], base)
            show(f"starting the gateway, S3 and AgentCore on this machine; logs: {folder}")
            async with (
                _serve(settings, Path(folder)) as url,
                AgentHarness(run_dir=Path(folder), config=settings, engine_url=url) as harness,
            ):
                runner = DevRunner(harness, app, console, settings)

                async def run() -> None:
                    try:
                        wanted = fit_to_runtime(find_tasks(file, task, limit), settings.runtime)
                    except (ConfigError, TaskFileError) as error:  # the next change may fix it
                        show(str(error))
                        return
                    for each in wanted:
                        await runner.run(each)

                await run_after_changes(run, source_changes(app.parent, file), show)
    return 0


@asynccontextmanager
async def _serve(config: RolloutConfig, log_dir: Path) -> AsyncIterator[str]:
    """Start the engine unless it is already running, and yield its URL."""
    if config.serving.kind == "external":
        yield config.serving.urls[0]
        return
    from rollout_backend.serving.engine_fleet import EngineFleet

    async with EngineFleet(config, log_dir, lambda event: None) as engines:
        yield engines.router_url


def _is_harbor(tasks: Path | None) -> TypeGuard[Path]:
    from rollout_backend.core.harbor import PREFIX

    return str(tasks).startswith(PREFIX)


def find_tasks(file: Path, wanted: str | None, limit: int) -> Sequence[Task]:
    """Return the first `limit` tasks of the file, the task with the id `wanted`, or one with that payload.

    Raises:
        ConfigError: the task does not exist, or the payload is not a JSON object.
        TaskFileError: the file is invalid.
    """
    from rollout_backend.core.tasks import Task, read_tasks

    if wanted is not None and wanted.lstrip().startswith("{"):
        try:
            return [Task("task", json.loads(wanted))]
        except ValueError as error:
            raise ConfigError(f"--task is not JSON ({error}): correct it, or give a task's id") from None
    if not (_is_harbor(file) or file.is_file()):
        raise ConfigError(f"there is no task file {file}: name one with --tasks, or give a payload with --task")
    found = read_tasks(file)
    if wanted is None:
        return found[:limit]
    chosen = [each for each in found if each.task_id == wanted]
    if not chosen:
        raise ConfigError(f"{file} has no task {wanted!r}; its first one is {found[0].task_id!r}")
    return chosen
