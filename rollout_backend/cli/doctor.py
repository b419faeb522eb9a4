"""`rollout doctor`: find everything that would stop a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rollout_backend.base.check_result import CheckResult, group_by_cause
from rollout_backend.cli.common import (
    SERVICE_SAMPLES,
    Limit,
    Overrides,
    Stack,
    console,
    echo,
    load_settings,
    read_limited,
)
from rollout_backend.errors import ConfigError

_STYLES = {"ok": "green", "unchecked": "dim", "warning": "yellow", "problem": "red"}


async def doctor(
    config: Annotated[Path | None, typer.Argument(help="Settings in YAML.")] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Also check how long a step of these tasks takes to start, and its cost.")
    ] = None,
    limit: Limit = None,
    stack: Stack = None,
    agent: Annotated[Path | None, typer.Option(help="Also start the agent from this Python file.")] = None,
    engine: Annotated[
        bool,
        typer.Option("--engine", help="Also start the engines and make a model call, which takes minutes."),
    ] = False,
    services: Annotated[
        bool, typer.Option("--services", help="Check only account, bucket, queue and runtime, from any machine.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a line for each check that passed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    override: Overrides = None,
) -> int:
    """Find everything that would stop a run, before it costs anything: credentials, permissions, bucket, queue,
    runtime, quotas, the public address, model, engines, versions, and this machine.

    Run it on the machine of the trainer. It prints one line for each finding, with what to do, the problems last, and
    exits with 2 if there is one. A run makes the quick ones of these checks first.
    """
    from rollout_backend.core.harbor import SUPPORTED_PREFIX
    from rollout_backend.core.tasks import planned_rollouts
    from rollout_backend.run.checks.examination import examine
    from rollout_backend.run.checks.machine import check_agent
    from rollout_backend.run.checks.preflight import check_tasks
    from rollout_backend.training.checks import check_service

    try:
        if config is None and stack is None:
            raise ConfigError("name the settings or --stack")
        settings = await load_settings(config, override or [], stack)
        service = settings.training_service
        trained = service if "serving" not in settings.model_fields_set else None
        if trained is not None:
            settings = await load_settings(config, [*(override or []), SERVICE_SAMPLES], stack)
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps([each.fields() for each in _invalid_settings(error)], indent=1))
        return 2
    if services and engine:
        raise ConfigError("choose one of --services and --engine")
    if trained is not None:
        if engine:
            raise ConfigError("--engine: rollout train starts no engine, because the service samples. Leave it out")
        # `rollout train` starts the server of the service's samples itself.
        serving = settings.serving.model_copy(update={"kind": "external", "urls": (), "follow_dns": True})
        settings = settings.model_copy(update={"serving": serving})
    rollouts, of_tasks = None, list[CheckResult]()
    if tasks is not None:
        wanted, leave_out = read_limited(tasks, limit, settings.runtime), str(tasks).startswith(SUPPORTED_PREFIX)
        fitting, of_tasks = await check_tasks(settings, wanted, leave_out=leave_out)
        rollouts = planned_rollouts(fitting, settings.group) if fitting else None
        if trained is not None:
            rollouts = trained.tasks_per_step * settings.group.size
    findings = []
    if agent is not None:
        runs_file = getattr(settings.run_runtime, "app", None) is None
        findings.append(await asyncio.to_thread(check_agent, agent, runs_file=runs_file))
    findings += await examine(settings, rollouts, machine=not services, engine=engine)
    if service is not None and settings.serving.kind != "tinker":
        findings += await check_service(settings, trains=True)
    findings = [*group_by_cause([*findings, *of_tasks])]
    if as_json:
        print(json.dumps([finding.fields() for finding in findings], indent=1))
    else:
        _print(findings, verbose)
    return 2 if any(finding.level == "problem" for finding in findings) else 0


def _invalid_settings(error: ConfigError) -> Iterator[CheckResult]:
    lines = str(error).splitlines()
    for line in lines[1:] or lines:
        setting = line.strip().partition(":")[0] if len(lines) > 1 else "settings"
        yield CheckResult("problem", setting, line.strip(), "settings")


def _print(findings: Sequence[CheckResult], verbose: bool) -> None:
    """Print the findings, the most important ones last, and whether a run can start."""
    from rollout_backend.base.formats import count

    by_level: dict[str, list[CheckResult]] = {level: [] for level in _STYLES}
    # Several checks may report the same finding.
    for finding in {(each.level, str(each)): each for each in findings}.values():
        by_level[finding.level].append(finding)
    # Another check of the same setting may have found something.
    found = {finding.setting for level in ("warning", "problem") for finding in by_level[level]}
    by_level["ok"] = [finding for finding in by_level["ok"] if finding.setting not in found]
    if not verbose and (names := dict.fromkeys(finding.setting for finding in by_level.pop("ok"))):
        _print_line("ok", ", ".join(names))
    for findings in by_level.values():
        for finding in findings:
            print_finding(finding)
    problems, warnings = len(by_level["problem"]), len(by_level["warning"])
    can = "cannot" if problems else "can"
    console.print(f"{count(problems, 'problem')}, {count(warnings, 'warning')}: a run {can} start", highlight=False)


def print_finding(finding: CheckResult) -> None:
    """Print one finding. Lines after its first are commands, which only the terminal wraps."""
    text, *commands = str(finding).splitlines()
    _print_line(finding.level, text)
    for command in commands:
        echo(f"{'':10}{command}")


def _print_line(level: str, text: str) -> None:
    from rollout_backend.views.terminal.view import print_wrapped

    print_wrapped(console, Text(f"{level:10}", _STYLES[level]), text)
