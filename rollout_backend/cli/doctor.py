"""`rollout doctor`: everything that would stop a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from rollout_backend.cli.common import (
    Limit,
    Overrides,
    Stack,
    console,
    exit_codes,
    load_settings,
    read_limited,
    run_async,
)
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.core.check_result import CheckResult
    from rollout_backend.core.tasks import Task

_STYLES = {"ok": "green", "unchecked": "dim", "warning": "yellow", "problem": "red"}


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Settings in YAML.")] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Also check how long a step of these tasks takes to start, and its cost.")
    ] = None,
    limit: Limit = None,
    stack: Stack = None,
    agent: Annotated[Path | None, typer.Option(help="Also import the agent from this Python file.")] = None,
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
) -> None:
    """Find everything that would stop a run, before it costs anything: credentials, permissions, bucket, queue,
    runtime, quotas, the public address, model, engines, versions, and this machine.

    Run it on the machine of the trainer. It prints one line for each finding, with what to do, the problems last, and
    exits with 2 if there is one. A run makes the quick ones of these checks first.
    """
    from rollout_backend.core.harbor import SUPPORTED_PREFIX

    with exit_codes():
        try:
            if config is None and stack is None:
                raise ConfigError("name the settings or --stack")
            settings = load_settings(config, override or [], stack)
        except ConfigError as error:
            if not as_json:
                raise
            print(json.dumps([each.fields() for each in _invalid_settings(error)], indent=1))
            raise typer.Exit(2) from None
        wanted = None if tasks is None else read_limited(tasks, limit, settings.runtime)
        if services and engine:
            raise ConfigError("choose one of --services and --engine")
        leave_out = str(tasks).startswith(SUPPORTED_PREFIX)
        how = {"leave_out": leave_out, "services": services, "engine": engine, "verbose": verbose, "as_json": as_json}
        run_async(_examine(settings, wanted, agent, **how))


def _invalid_settings(error: ConfigError) -> Iterator[CheckResult]:
    from rollout_backend.core.check_result import CheckResult

    lines = str(error).splitlines()
    for line in lines[1:] or lines:
        setting = line.strip().partition(":")[0] if len(lines) > 1 else "settings"
        yield CheckResult("problem", setting, line.strip(), "settings")


async def _examine(
    config: RolloutConfig,
    tasks: Sequence[Task] | None,
    agent: Path | None,
    *,
    leave_out: bool,
    services: bool,
    engine: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    from rollout_backend.checks.examination import examine
    from rollout_backend.checks.machine import check_agent
    from rollout_backend.checks.preflight import check_tasks
    from rollout_backend.core.tasks import planned_rollouts

    fitting, of_tasks = (None, []) if tasks is None else await check_tasks(config, tasks, leave_out=leave_out)
    rollouts = planned_rollouts(fitting, config.group) if fitting else None
    findings = [check_agent(agent)] if agent is not None else []
    findings += await examine(config, rollouts, machine=not services, engine=engine)
    findings += of_tasks
    if as_json:
        print(json.dumps([finding.fields() for finding in findings], indent=1))
    else:
        _print(findings, verbose)
    return 2 if any(finding.level == "problem" for finding in findings) else 0


def _print(findings: Sequence[CheckResult], verbose: bool) -> None:
    """Print the findings, the most important ones last, and whether a run can start."""
    from rollout_backend.core.formats import count

    by_level: dict[str, list[CheckResult]] = {level: [] for level in _STYLES}
    for finding in dict.fromkeys(findings):  # several checks may report the same problem
        by_level[finding.level].append(finding)
    passed = by_level.pop("ok") if not verbose else []
    if passed:
        names = ", ".join(dict.fromkeys(finding.setting for finding in passed))
        console.print(f"[green]ok       [/] {escape(names)}", highlight=False, soft_wrap=True)
    for found in by_level.values():
        for finding in found:
            print_finding(finding)
    problems, warnings = len(by_level["problem"]), len(by_level["warning"])
    can = "cannot" if problems else "can"
    console.print(f"{count(problems, 'problem')}, {count(warnings, 'warning')}: a run {can} start", highlight=False)


def print_finding(finding: CheckResult) -> None:
    """Print one line."""
    style = _STYLES[finding.level]
    console.print(f"[{style}]{finding.level:9}[/] {escape(str(finding))}", highlight=False, soft_wrap=True)
