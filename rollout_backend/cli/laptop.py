"""Commands that run an agent on this machine: `rollout init` makes it, `rollout dev` runs it again after each change,
`rollout demo` shows the whole path, and `rollout engine install` installs an engine and a small model for both."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard

import typer

from rollout_backend.cli.common import (
    Json,
    Overrides,
    Quiet,
    ScorerOption,
    Verbose,
    console,
    echo,
    run_output,
    with_scorer,
)
from rollout_backend.cli.run import collect_step
from rollout_backend.config import EngineName, RolloutConfig, load_config
from rollout_backend.errors import ConfigError, TaskFileError

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task

Settings = Mapping[str, Any]
Template = Literal["openai", "strands", "pydantic-ai", "command", "bedrock-agentcore"]

TEMPLATES = Path(__file__).parents[1] / "workbench" / "local" / "templates"
EXAMPLE = Path(__file__).parents[1] / "workbench" / "local" / "demo"
"""`examples/arithmetic`, which the installed package includes."""
# All templates share these files, and a template can replace them.
_COMMON = "common"
_TASKS = "tasks.jsonl"
_TAKEN = 16


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the agent, new or empty.")],
    template: Annotated[
        Template,
        typer.Option(
            help="The agent's framework; `command` runs a program in any language, and `bedrock-agentcore` has an "
            "app of AWS's SDK with a scorer."
        ),
    ] = "openai",
) -> None:
    """Create an agent from a template: its code and test, tasks, settings and Dockerfile."""
    _copy(template, folder)
    place = shlex.quote(str(folder))
    scorer = " --scorer scorer.py:score" if (folder / "scorer.py").is_file() else ""
    for line in (
        f"{folder} holds an agent ({template}): {', '.join(sorted(path.name for path in folder.iterdir()))}",
        "Next:",
        f"  cd {place} && pip install -r requirements.txt pytest",
        "  pytest",
        f"  rollout dev agent.py{scorer}",
        "config.yaml is for a run on AWS. This lists what to fill in, and then everything that would stop a run:",
        "  rollout doctor config.yaml --agent agent.py",
    ):
        echo(line)


def _copy(template: Template, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name a new one")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new or an empty folder")
    try:
        for source in (_COMMON, template):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(TEMPLATES / source, folder, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        # The error of shutil lists each file.
        why = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        raise ConfigError(f"{folder} cannot be written: {why}") from None


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
    scorer: ScorerOption = None,
    reply: Annotated[
        int, typer.Option(min=0, help="Which of the script's replies to a task to take. One in three is wrong.")
    ] = 0,
    override: Overrides = None,
) -> int:
    """Run an agent on one task, show each of its model calls as it happens, and run it again after each change of its
    source.

    A script answers instead of a model, unless you name one with --engine or --endpoint. It gives a task the same
    reply each time, so that the reward changes only with the agent; --reply takes another one. The agent runs on a
    local S3 and AgentCore, as in `rollout demo`. A Harbor task is scored by its tests. An error shows the traceback
    of the files of the agent. Press Ctrl-C to stop.
    """
    from rollout_backend.base.check_result import raise_problems
    from rollout_backend.core.harbor import fit_to_runtime
    from rollout_backend.core.reasons import NOT_SERVING
    from rollout_backend.run.checks.machine import check_agent
    from rollout_backend.workbench.local.dev import DevRunner, run_after_changes, source_changes
    from rollout_backend.workbench.local.harness import AgentHarness

    if engine and endpoint is not None:
        raise ConfigError("--engine starts a server: leave out --engine or --endpoint")
    if task is not None and limit > 1:
        raise ConfigError("--task names one task: leave out --task or --limit")
    if not app.is_file() or app.suffix != ".py":
        raise ConfigError(f"there is no agent at {app}: name the Python file that starts its app")
    app = app.absolute()
    file = tasks if _is_harbor(tasks) else (tasks or app.parent / _TASKS).absolute()
    # Refuse an invalid file now; it is read again after each change.
    find_tasks(file, task, limit)
    # Check before the engine starts. Without an engine, the agent's session finds the same sooner.
    if engine:
        started = await asyncio.to_thread(check_agent, app)
        raise_problems([started] if started.name == NOT_SERVING else [])

    def show(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="rollout-dev-") as folder:
        async with local_model(not engine and endpoint is None, endpoint, 1, show, reply=reply) as model:
            base = {"sampling": {"temperature": 1.0, "max_tokens": 512}, "timeouts": {"agent_s": 600}, **model}
            settings = load_local_config(None, with_scorer(override, scorer), base)
            show(f"starting the gateway, S3 and AgentCore on this machine; logs: {folder}")
            async with (
                _serve(settings, Path(folder)) as url,
                AgentHarness(run_dir=Path(folder), config=settings, engine_url=url) as harness,
            ):
                runner = DevRunner(harness, app, console, settings)

                async def run() -> None:
                    try:
                        wanted = fit_to_runtime(find_tasks(file, task, limit), settings.runtime)
                    except (ConfigError, TaskFileError) as error:
                        # The next change may correct it.
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
    from rollout_backend.model.serving.engine_fleet import EngineFleet

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


async def demo(
    agent: Annotated[
        Path | None,
        typer.Option(help="Python file that starts the agent's app. Default: an agent that adds numbers."),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="JSONL or parquet with `payload` and optional `task_id`. Default: 64 sums.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use only the first N tasks.")] = _TAKEN,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Answer from a script instead of a model; installs nothing.")
    ] = False,
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Engine to start.")] = "sglang",
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this running SGLang or vLLM server.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings in YAML. Bucket and runtime are those of the local cloud.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Number of engine servers to start.")] = 1,
    scorer: ScorerOption = None,
    override: Overrides = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Run an agent on this machine: a real engine on the CPU, local S3, SQS and AgentCore.

    The first time, this installs the engine and a small model, which takes about two minutes; with --scripted or
    --endpoint it does not. Exit codes as for `rollout run`.
    """
    from rollout_backend.base.check_result import raise_problems
    from rollout_backend.base.formats import count
    from rollout_backend.core.tasks import read_tasks
    from rollout_backend.run.accounts.run_info import agent_of
    from rollout_backend.run.checks.machine import check_agent
    from rollout_backend.workbench.local.cloud import LocalCloud
    from rollout_backend.workbench.local.scripted import is_sum

    output, overrides = run_output(quiet, verbose, as_json), with_scorer(override, scorer)
    if scripted and endpoint is not None:
        raise ConfigError("--scripted answers without a server: leave out --scripted or --endpoint")
    if agent is not None:
        started = await asyncio.to_thread(check_agent, agent)
        raise_problems([started])
        if started.level == "warning":
            output.status(f"warning: {started}")
    agent, tasks = agent or EXAMPLE / "agent.py", tasks or EXAMPLE / "tasks.jsonl"
    found = read_tasks(tasks)
    wanted = found[:limit]
    if scripted and (others := sum(not is_sum(json.dumps(dict(task.payload))) for task in wanted)):
        output.status(
            f"the script can answer {len(wanted) - others} of {count(len(wanted), 'task')}: those that ask "
            '"What is A + B?". The others get a fixed reply'
        )
    async with local_model(scripted, endpoint, servers, output.status, engine) as model:
        base = {
            "group": {"size": 4},
            "sampling": {"temperature": 1.0, "max_tokens": 64},
            "timeouts": {
                "model_call_s": 120,
                "agent_s": 240,
                "publish_grace_s": 60,
                "collection_s": 600,
                "session_key_s": 900,
            },
            **model,
        }
        # Show errors before the cloud starts.
        early = load_local_config(config, overrides, base)
        taken = f"all {len(found)}" if len(wanted) == len(found) else f"the first {len(wanted)} of {len(found)}"
        output.status(f"{taken} tasks of {tasks}, {count(early.group.size, 'rollout')} of each")
        if len(wanted) < len(found):
            output.status(f"--limit {len(found)} takes all")
        async with LocalCloud(agent, run_dir=early.run_dir / "logs", bucket=early.storage.bucket) as cloud:
            os.environ.update(cloud.environ)
            settings = load_config(config, overrides, base=base, top={"run_id": early.run_id, **cloud.settings()})
            code = await collect_step(
                settings, wanted, output, cloud.wait_lost, started_by="demo", agent=agent_of(agent)
            )
            sessions = (await cloud.sessions())["sessions"]
            if sessions or output.style == "verbose":
                console.print(f"the runtime itself counts {len(sessions)} open sessions")
            return 1 if sessions else code


def engine_install(
    engine: Annotated[
        Literal["sglang", "vllm"], typer.Option(help="Engine to install. Each one has a separate environment.")
    ] = "sglang",
    torch_index_url: Annotated[str | None, typer.Option(help="Package index for the CPU build of torch.")] = None,
) -> None:
    """Install SGLang or vLLM for the CPU in a separate environment, and a small real model, in the cache folder."""
    from rollout_backend.model.serving.install import cache_dir, install_cpu_engine, prepare_model

    python = install_cpu_engine(cache_dir(), engine, torch_index_url=torch_index_url, echo=echo)
    model = prepare_model(cache_dir(), engine, echo=echo)
    echo(f"engine: {python}\nmodel: {model}")


# --- the model ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def local_model(
    scripted: bool,
    endpoint: str | None,
    servers: int,
    echo: Callable[[str], None],
    engine: EngineName = "sglang",
    reply: int | None = None,
) -> AsyncIterator[Settings]:
    """Yield the settings of a model on this machine, served by a script, by `endpoint`, or by an engine started here.
    With `reply`, the script always gives this reply to a prompt.

    Raises:
        PreflightError: the endpoint cannot serve rollouts.
    """
    if scripted:
        from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine, ScriptedSums

        some = "a third of its sums are wrong" if reply is None else f"it gives reply {reply} to each prompt"
        echo(f"a script answers instead of a model, and {some}")
        with ScriptedEngine(ScriptedSums(reply)) as script:
            model = {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": 32_768}
            yield {"model": model, "serving": {"kind": "external", "urls": [script.url]}}
    elif endpoint is not None:
        from rollout_backend.model.serving.external_engine import served_model

        url = endpoint.rstrip("/").removesuffix("/v1")
        served = await served_model(url)
        echo(f"{url} serves {served.path}")
        serving = {"kind": "external", "engine": served.engine, "urls": [url]}
        yield {"model": {"path": served.path}, "serving": serving}
    else:
        model_path = _install(engine, echo)
        threads = max(1, ((os.cpu_count() or 2) - 1) // servers)
        yield {
            "model": {"path": model_path, "renderer": "chatml", "context_length": 2048},
            "serving": {"engine": engine, "device": "cpu", "servers": servers, "threads": threads},
        }


def _install(engine: EngineName, echo: Callable[[str], None]) -> str:
    """Install the engine and the model if they are missing. Return the model's folder."""
    from rollout_backend.model.serving.install import (
        CPU_ENGINES,
        cache_dir,
        find_engine,
        find_model,
        install_cpu_engine,
        prepare_model,
    )

    cache = cache_dir()
    try:
        find_engine(cache, engine)
        find_model(cache)
    except ConfigError:
        title = CPU_ENGINES[engine].title
        echo(f"{title} for the CPU and a 135M model are installed once, in {cache}: two minutes, 3.5 GB")
        echo("to use a script instead: `rollout demo --scripted`, or `rollout dev` without --engine")
    install_cpu_engine(cache, engine, echo=echo)
    return str(prepare_model(cache, engine, echo=echo))


def load_local_config(file: Path | None, overrides: Sequence[str], base: Settings) -> RolloutConfig:
    """Load the settings of a run on this machine, with placeholders for its storage and runtime.

    Raises:
        ConfigError: the settings are invalid, or the model's folder is not on this machine.
    """
    placeholder = {"storage": {"bucket": "rollouts"}, "runtime": {"kind": "http", "url": "http://127.0.0.1"}}
    config = load_config(file, overrides, base=base, top=placeholder)
    if not config.model.folder.is_dir():
        raise ConfigError(
            f"{config.model.path} is not a folder on this machine: name a folder that has the tokenizer and "
            "config.json of the served model with -o model.path=FOLDER"
        )
    return config
