"""Shows a run, or a step of it, in a terminal or as JSON: its numbers, what to look at first, and where next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_wrapper.contract import Outcome
from rollout_backend.core.formats import count, percent, seconds
from rollout_backend.core.reasons import documented_at
from rollout_backend.errors import ConfigError
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.cost import Cost, Prices
from rollout_backend.results.findings import FailureCount, Finding, Level, count_failures, findings_of, show_command
from rollout_backend.results.page.step_page import PHASES
from rollout_backend.results.run_data import StepData, last_start, read_config, read_steps
from rollout_backend.results.run_list import RunSummary, summarize_run
from rollout_backend.results.summary import Learning, Seconds, StepSummary, TaskRewards, duration, summarize
from rollout_backend.results.terminal.live_view import one_line
from rollout_backend.results.terminal.run_summary import MARKS
from rollout_backend.results.terminal.view import when

STEPS = 20  # in the table of a run
_TASKS = 5  # in the table of a step; --json has all


@dataclass(frozen=True)
class StepView:
    """One step that has ended, or was interrupted."""

    data: StepData
    prices: Prices | None  # None: the settings name none

    @cached_property
    def summary(self) -> StepSummary:
        """Return the numbers of the step."""
        return summarize(self.data.records)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return what to look at first."""
        return findings_of(self.data.report, self.data.records, self.summary)

    @cached_property
    def failures(self) -> list[FailureCount]:
        """Return the reasons of failures, the most frequent first."""
        return sorted(count_failures(self.data.records), key=lambda failure: -failure.number)

    @cached_property
    def cost(self) -> Cost | None:
        """Return the estimated cost."""
        return self.prices.cost_of(self.data.records) if self.prices is not None else None

    @property
    def trained(self) -> int:
        """Return how many rollouts the trainer gets."""
        return sum(record.trained for record in self.data.records)

    def fields(self, *, tasks: bool) -> dict[str, Any]:
        """Return the step as an object for JSON, with its `tasks` or without."""
        summary = self.summary
        fields = {
            "step": self.data.step,
            "name": self.data.name,
            "validates": self.data.validates,
            "planned": summary.planned,
            "outcomes": {outcome or "not_settled": number for outcome, number in summary.outcomes.items()},
            "trained": self.trained,
            "mean_reward": summary.reward.value if summary.reward is not None else None,
            "sampled_tokens": summary.sampled_tokens,
            "prompt_tokens": summary.prompt_tokens,
            "cache_hit": summary.cache_hit,
            "seconds": summary.seconds,
            "spent_seconds": asdict(summary.spent),
            "cost": self.cost and self.cost.fields(),
            "findings": [asdict(each) | {"level": each.level.name.lower()} for each in self.findings],
            "failures": [asdict(each) | {"see": documented_at(each.reason)} for each in self.failures],
        }
        return fields | ({"tasks": [_task_fields(task) for task in summary.tasks]} if tasks else {})


def _task_fields(task: TaskRewards) -> dict[str, Any]:
    return {"task_id": task.task_id, "mean": task.mean, "rewards": task.rewards, "learning": task.learning}


@dataclass(frozen=True)
class RunView:
    """A run, or one step of it. `show` is appended to each `rollout show`; it may be empty."""

    run_dir: Path
    about: RunSummary
    steps: tuple[StepView, ...]
    step: int | None  # the only one to show
    show: str

    @classmethod
    def read(cls, run_dir: Path, step: int | None, show: str = "", *, last: int | None = None) -> Self:
        """Read a run's folder: one step, or its `last` ones, or all.

        Raises:
            ConfigError: the run has no such step, or a file is damaged or of another version.
        """
        config, ended = read_config(run_dir), RunArchive(run_dir).steps()
        prices = Prices.of(config) if config is not None else None
        if step is not None and step not in ended:
            steps = f"steps {ended[0]} to {ended[-1]}" if ended else "no step"
            raise ConfigError(f"step {step} of {run_dir} has no records: it has those of {steps}")
        wanted = ended[-last:] if last is not None and step is None else ended if step is None else [step]
        views = tuple(StepView(each, prices) for each in (read_steps(run_dir, wanted) if wanted else ()))
        return cls(run_dir, summarize_run(run_dir), views, step, show)

    def fields(self) -> dict[str, Any]:
        """Return the run as an object for JSON, or its step if it was asked for."""
        if self.step is not None:
            return {"run_id": self.about.run_id, **self.steps[0].fields(tasks=True)}
        return self.about.model_dump() | {"steps": [step.fields(tasks=False) for step in self.steps]}

    def print(self, console: Console) -> None:
        """Print the run, or its step if it was asked for."""
        for line in self._about():
            console.print(line, soft_wrap=True, highlight=False)
        if len(self.steps) == 1:
            _print_step(console, self.steps[0], self.show)
        elif self.steps:
            _print_steps(console, self.steps)
            if (more := self.about.steps - len(self.steps)) > 0:
                console.print(f"and {count(more, 'step')} before; --json has all", style="dim", highlight=False)
        self._print_next(console)

    def _about(self) -> Iterator[Text]:
        about = self.about
        began = f", began {when(about.began)}" if about.began is not None else ""
        of_steps = f", {count(about.steps, 'step')}"
        yield Text.assemble((f"run {about.run_id}", "bold"), f"  {about.state}{began}{of_steps}")
        start = last_start(RunArchive(self.run_dir))
        if start is not None and start.agent:
            yield Text(f"agent {one_line(start.agent.get('path') or start.agent.get('arn') or str(start.agent))}")
        if start is not None and start.error:
            yield Text(one_line(start.error), "red")
        if about.state == "killed" or not self.steps:
            planned = "?" if about.planned is None else f"{about.planned:,}"
            yield Text(f"{about.completed:,} of {planned} planned rollouts have completed")

    def _print_next(self, console: Console) -> None:
        run = shlex.quote(str(self.run_dir))
        lines = {f"rollout report {run}": "all of it, in your browser"}
        if len(self.steps) == 1:
            summary = self.steps[0].summary
            slowest = max(self.steps[0].data.records, key=lambda record: duration(record) or 0.0)
            worst = summary.tasks[0].task_id
            lines |= {
                f"{show_command(worst)}{self.show}": "the task with the lowest mean reward",
                f"{show_command(slowest.rollout_id)}{self.show}": "the rollout that took longest",
            }
        elif self.steps:
            last = self.steps[-1].data.step
            lines |= {f"rollout show --step {last}{self.show}": "one step, here the last"}
        if self.about.state in ("killed", "interrupted"):
            lines |= {f"rollout run --resume {run}": "finish it"}
        width = max(map(len, lines))
        for command, what in lines.items():
            console.print(Text.assemble(f"  {command:{width}}  ", (what, "dim")), soft_wrap=True, highlight=False)


def _print_step(console: Console, step: StepView, show: str) -> None:
    summary = step.summary
    counts = {outcome or "not settled": summary.outcomes.get(outcome, 0) for outcome in (*Outcome, None)}
    outcomes = " + ".join(f"{number:,} {outcome}" for outcome, number in counts.items() if number)
    facts = {f"step {step.data.name}": f"{summary.planned:,} planned = {outcomes}; {step.trained:,} trained"}
    if summary.reward is not None:
        margin = f" ± {summary.reward.margin:.3f}" if summary.reward.margin is not None else ""
        kinds = {each: summary.tasks_of(each) for each in Learning}
        tasks = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
        facts["reward"] = f"{summary.reward.value:.3f}{margin}; tasks: {tasks}"
    facts["time"] = f"{seconds(summary.seconds)}; rollouts spent {_spent(summary.spent)}"
    facts["tokens"] = (
        f"{summary.sampled_tokens:,} sampled, {summary.prompt_tokens:,} prompt, cache {percent(summary.cache_hit)}"
    )
    if step.cost is not None:
        facts["cost"] = str(step.cost)
    for name, text in facts.items():
        console.print(Text.assemble((f"{name:8} ", "dim"), text), soft_wrap=True, highlight=False)
    for finding in step.findings:
        advice = f" ({finding.advice}{show if finding.advice.startswith('rollout show ') else ''})"
        text = one_line(f"{finding.text}{advice if finding.advice else ''}")
        mark, style = MARKS[finding.level], "red" if finding.level is Level.BAD else ""
        console.print(Text(f"  {mark} {text}", style), soft_wrap=True, highlight=False)
    if step.failures:
        console.print(_failures(step.failures))
    console.print(_lowest(summary.tasks))


def _spent(spent: Seconds) -> str:
    parts = {name: getattr(spent, name) / (spent.total or 1.0) for name in PHASES}
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
    return ", ".join(f"{parts[name]:.0%} in {PHASES[name]}" for name in largest if parts[name] >= 0.005) or "none"


def _failures(failures: list[FailureCount]) -> Table:
    table = _table("outcome", "reason", "rollouts", "first", "message")
    for each in failures:
        cells = (each.outcome, each.reason, str(each.number), each.first, one_line(each.message)[:120])
        table.add_row(*map(Text, cells))
    return table


def _lowest(tasks: tuple[TaskRewards, ...]) -> Table:
    table = _table(f"lowest {_TASKS} of {len(tasks)} tasks" if len(tasks) > _TASKS else "task", "mean", "rewards")
    for task in tasks[:_TASKS]:
        mean = "none" if task.mean is None else f"{task.mean:.3f}"
        table.add_row(Text(task.task_id), mean, " ".join(f"{reward:g}" for reward in task.rewards))
    return table


def _print_steps(console: Console, steps: tuple[StepView, ...]) -> None:
    table = _table("step", "planned", "completed", "trained", "mean reward", "groups usable", "cache", "time")
    for step in steps:
        summary, report = step.summary, step.data.report
        number = str(step.data.step)
        table.add_row(
            number if step.data.name == number else f"{number} ({step.data.name})",
            f"{summary.planned:,}",
            f"{summary.completed:,}",
            f"{step.trained:,}",
            "none" if summary.reward is None else f"{summary.reward.value:.3f}",
            "interrupted"
            if report is None
            else f"{sum(group.usable for group in report.groups)}/{len(report.groups)}",
            percent(summary.cache_hit),
            seconds(summary.seconds),
        )
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name)
    return table
