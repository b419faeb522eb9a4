"""`rollout run`: run rollouts without a trainer."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import (
    RUNS,
    Json,
    Limit,
    Overrides,
    Quiet,
    ScorerOption,
    Stack,
    TaskFile,
    Verbose,
    complete_run,
    console,
    find_run,
    load_settings,
    read_limited,
    run_output,
    with_scorer,
)
from rollout_backend.config import ENV_PREFIX, ProcessConfig, RolloutConfig, load_config
from rollout_backend.errors import ConfigError, RolloutBackendError

if TYPE_CHECKING:
    from rollout_backend.core.tasks import Task
    from rollout_backend.run.accounts.run_info import StartedBy
    from rollout_backend.views.terminal.run_output import RunOutput

_RESTARTS = {
    "local": "its S3 was on this machine and ended with it; start it again with `rollout run --local`",
    "demo": "it was a demo, whose S3 ended with it; start another one with `rollout demo`",
    "verl": "verl trained with it; start the trainer again, with the same project and experiment name",
    "train": "it is a training; start `rollout train` again, with the same run_id",
    "python": "a program collected its steps; start that program again, with the same run_id",
}


async def run(
    config: Annotated[Path | None, typer.Argument(help="Settings in YAML.")] = None,
    tasks: TaskFile = None,
    limit: Limit = None,
    stack: Stack = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Resume a run with its settings: its id in ./runs, or its folder.",
            autocompletion=complete_run,
        ),
    ] = None,
    min_completed: Annotated[
        int, typer.Option(min=0, help="Exit with code 3 if fewer rollouts than this complete.")
    ] = 0,
    local: Annotated[
        bool, typer.Option("--local", help="Use S3 and SQS emulators on this machine for the duration of the run.")
    ] = False,
    scorer: ScorerOption = None,
    override: Overrides = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Run every task once without a trainer, as an evaluation, and report.

    The summary at the end begins with the verdict, which explains the exit code.

    With --resume, finished rollouts are kept, running agents are awaited, and only the remaining rollouts run.

    With --local, agents run as processes on this machine (runtime.kind=process), without AWS. The run's folder keeps
    every result.

    Exit codes: 0, there is something to train on; 1, the run failed; 2, the input is invalid, and nothing was
    started; 3, there is nothing to train on, or fewer rollouts completed than --min-completed; 130, interrupted.
    """
    from rollout_backend.core.harbor import SUPPORTED_PREFIX

    output, override = run_output(quiet, verbose, as_json), with_scorer(override, scorer)
    if resume is not None:
        if config is not None or tasks is not None or limit is not None or stack is not None or local:
            raise ConfigError(
                "--resume uses the run's settings and tasks: leave out CONFIG, --tasks, --limit, --stack and --local"
            )
        settings, wanted = _read_run(find_run(resume), override)
    elif (config is None and stack is None) or tasks is None:
        raise ConfigError("name the settings or --stack, and --tasks, or a run to --resume")
    elif local:
        if config is None or stack is not None:
            raise ConfigError("--local needs CONFIG, and no --stack")
        return await _run_on_local_storage(config, override, tasks, limit, output, min_completed)
    else:
        settings = await load_settings(config, override, stack)
        wanted = read_limited(tasks, limit, settings.runtime)
    leave_out = str(tasks).startswith(SUPPORTED_PREFIX)
    resumed = resume is not None
    return await collect_step(
        settings, wanted, output, min_completed=min_completed, leave_out=leave_out, resumed=resumed
    )


async def _run_on_local_storage(
    file: Path, overrides: Sequence[str], tasks: Path, limit: int | None, output: RunOutput, min_completed: int
) -> int:
    """Run one step as `collect_step` does, on S3 and SQS that end with it."""
    from rollout_backend.agents.runtimes.process.control import stop_all
    from rollout_backend.workbench.local.cloud import LocalStorage

    base = {"storage": {"bucket": "rollouts"}}
    # Show errors before anything starts.
    early = load_config(file, overrides, base=base)
    if type(early.runtime) is not ProcessConfig:
        raise ConfigError(
            f"--local keeps S3 on this machine, where agents of runtime.kind={early.runtime.kind} may not reach it: "
            "set runtime.kind=process, or try `rollout demo`"
        )
    wanted = read_limited(tasks, limit, early.runtime)
    async with LocalStorage(run_dir=early.run_dir / "logs", bucket=early.storage.bucket) as storage:
        # Agents inherit these variables.
        os.environ.update(storage.environ)
        config = load_config(file, overrides, base=base, top={"run_id": early.run_id, **storage.settings()})
        runtime = config.run_runtime
        assert isinstance(runtime, ProcessConfig)
        try:
            return await collect_step(config, wanted, output, storage.wait_lost, min_completed, started_by="local")
        finally:
            if runtime.session_logs is not None:
                # A run that lost its S3 may leave sessions open.
                stop_all(runtime.session_logs)


def _read_run(folder: Path, overrides: Sequence[str]) -> tuple[RolloutConfig, Sequence[Task]]:
    """Return the settings and the tasks of a run.

    Raises:
        ConfigError: the run cannot be resumed; says why.
    """
    from rollout_backend.run.accounts.archive import CONFIG, RunArchive
    from rollout_backend.run.accounts.run_info import secret_settings

    archive = RunArchive(folder)
    try:
        info = archive.read_info()
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be resumed: its run.json cannot be read: {error}") from None
    tasks = archive.tasks_file(0)
    if info is None or not tasks.is_file():
        raise ConfigError(f"{folder} cannot be resumed: it holds no tasks, so nothing was started. Start it again")
    if (by := info.starts[-1].by) != "run":
        raise ConfigError(f"{folder} cannot be resumed by `rollout run`: {_RESTARTS[by]}")
    if folder.name != info.run_id:
        # The folder may be `.` or a link.
        folder = folder.resolve()
    if folder.name != info.run_id:
        raise ConfigError(f"{folder} cannot be resumed: it holds run {info.run_id!r}; rename it to that")
    try:
        settings = load_config(
            folder / CONFIG, overrides, top={"run_id": info.run_id, "output_dir": str(folder.parent)}
        )
    except ConfigError as error:
        raise ConfigError(f"{error}\n{_set_again(info.secrets)}" if info.secrets else str(error)) from None
    if missing := sorted(set(info.secrets).difference(secret_settings(settings), ["gateway.previous_secret"])):
        raise ConfigError(_set_again(missing))
    return settings, read_limited(tasks, None, settings.runtime)


def _set_again(secrets: Sequence[str]) -> str:
    names = ", ".join(f"{name} ({ENV_PREFIX}{name.upper().replace('.', '__')})" for name in secrets)
    return f"a run's folder holds no secrets: set these again in the environment: {names}"


async def collect_step(
    config: RolloutConfig,
    tasks: Sequence[Task],
    output: RunOutput,
    wait_lost: Callable[[], Awaitable[None]] | None = None,
    min_completed: int = 0,
    started_by: StartedBy = "run",
    agent: Mapping[str, str] | None = None,
    leave_out: bool = False,
    resumed: bool = False,
) -> int:
    """Run one step, show its progress, and print its summary. Return the exit code. With `leave_out`, tasks that the
    runtime cannot start are left out. With `resumed`, they stay, and their rollouts fail.

    If the run is interrupted or fails after its start, print what has finished and how to resume.

    Raises:
        ConfigError: `min_completed` exceeds the number of planned rollouts.
        PreflightError: the runtime cannot start some tasks; names each.
    """
    from rollout_backend.base.check_result import raise_problems
    from rollout_backend.core.tasks import check_private, planned_rollouts
    from rollout_backend.manager import RolloutManager
    from rollout_backend.run.accounts.cost import Prices
    from rollout_backend.run.accounts.findings import judge
    from rollout_backend.run.accounts.summary import count_failures, summarize
    from rollout_backend.run.checks.preflight import check_tasks
    from rollout_backend.views.page.report import try_to_write_report
    from rollout_backend.views.terminal.run_view import RunSummary
    from rollout_backend.views.terminal.view import print_step

    check_private(tasks, config.scoring.enabled)
    tasks, findings = await check_tasks(config, tasks, leave_out=leave_out, resumed=resumed)
    raise_problems(findings)
    for finding in findings:
        # The manager reports task-resources.
        if finding.level == "warning" and finding.name != "task-resources":
            output.status(str(finding))
    rollouts = planned_rollouts(tasks, config.group)
    if min_completed > rollouts:
        raise ConfigError(f"--min-completed={min_completed} is more than the {rollouts} rollouts that the run plans")
    manager = RolloutManager(
        config,
        on_status=output.status,
        on_phase=output.phase,
        on_serving=output.serving,
        rollouts=rollouts,
        wait_lost=wait_lost,
        started_by=started_by,
        agent=agent,
    )
    output.begin(config, tasks=len(tasks), rollouts=rollouts, agent=agent)
    started = False
    try:
        async with output.watch(manager.progress), manager:
            started = True
            output.started(manager.config)
            result = await manager.collect(tasks)
            output.failures(count_failures(result.records))
    except (asyncio.CancelledError, RolloutBackendError):
        if started:
            report = try_to_write_report(config.run_dir)
            run_name = config.run_id if config.output_dir == RUNS else str(config.run_dir)
            resume = f"rollout run --resume {shlex.quote(run_name)}"
            resume += f" --min-completed {min_completed}" if min_completed else ""
            records = manager.archive.read_records(0)
            output.unfinished(records, config.run_dir, report, resume if started_by == "run" else None)
        raise
    seconds = output.seconds()
    if output.style == "verbose":
        print_step(console, result, config.run_dir)
    verdict = judge(result.report, summarize(result.records), min_completed)
    code = 1 if not result.report.balanced else 0 if verdict.passed else 3
    output.end(
        RunSummary(
            result,
            verdict,
            code,
            seconds,
            report=try_to_write_report(config.run_dir),
            show="" if config.output_dir == RUNS else f" --run {shlex.quote(str(config.run_dir))}",
            again=_again_command(config) if started_by == "run" else "",
            prices=Prices.of(manager.config),
        )
    )
    return code


def _again_command(config: RolloutConfig) -> str:
    from rollout_backend.run.accounts.archive import CONFIG, RunArchive

    tasks = RunArchive(config.run_dir).tasks_file(0)
    files = shlex.join([str(config.run_dir / CONFIG), "--tasks", str(tasks)])
    return f"rollout run {files} -o run_id={shlex.quote(f'{config.run_id}-again')}"
