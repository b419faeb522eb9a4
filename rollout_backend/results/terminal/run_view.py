"""Show a run, or a step of it, in a terminal or as JSON: its numbers, what to look at first, and where next."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from rollout_backend.results.cost import Prices
from rollout_backend.results.findings import FailureCount, Level, show_command
from rollout_backend.results.run_data import RunOverview, StepData, last_start, read_config, read_steps, summarize_run
from rollout_backend.results.summary import Learning, Seconds, TaskRewards, duration
from rollout_backend.results.terminal.live_view import one_line
from rollout_backend.results.terminal.run_summary import MARKS
from rollout_backend.results.terminal.view import plain_table, print_text, when

STEPS = 20  # number of steps in the table of a run
_TASKS = 5  # number of tasks in the table of a step; --json lists all


def _step_fields(step: StepData, prices: Prices | None) -> dict[str, Any]:
    summary, cost = step.summary, step.cost(prices)
    return {
        "step": step.step,
        "name": step.name,
        "validates": step.validates,
        "planned": summary.planned,
        "outcomes": {outcome or "not_settled": number for outcome, number in summary.outcomes.items()},
        "trained": step.trained,
        "mean_reward": summary.mean_reward,
        "sampled_tokens": summary.sampled_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "cache_hit": summary.cache_hit,
        "seconds": summary.seconds,
        "spent_seconds": asdict(summary.spent),
        "cost": cost and cost.fields(),
        "findings": [finding.fields() for finding in step.findings],
        "failures": [asdict(each) | {"see": documented_at(each.reason)} for each in step.failures],
    }


@dataclass(frozen=True)
class RunView:
    """A run, or one step of it. `show` is appended to each `rollout show`; it may be empty."""

    run_dir: Path
    about: RunOverview
    steps: tuple[StepData, ...]
    step: int | None  # the only step to show
    show: str
    prices: Prices | None  # None: the settings name none

    @classmethod
    def read(cls, run_dir: Path, step: int | None, show: str = "", *, last: int | None = None) -> Self:
        """Read a run directory: one step, its `last` steps, or all steps.

        Raises:
            ConfigError: the run has no such step, or a file is damaged or has another version.
        """
        config, ended = read_config(run_dir), RunArchive(run_dir).steps()
        prices = Prices.of(config) if config is not None else None
        if step is not None and step not in ended:
            others = f"steps {ended[0]} to {ended[-1]}" if ended else "no step"
            raise ConfigError(f"step {step} of {run_dir} has no records: it has those of {others}")
        wanted = ended[-last:] if last is not None and step is None else ended if step is None else [step]
        steps = tuple(read_steps(run_dir, wanted) if wanted else ())
        return cls(run_dir, summarize_run(run_dir), steps, step, show, prices)

    def fields(self) -> dict[str, Any]:
        """Return the run, or the requested step, as an object for JSON."""
        if self.step is not None:
            tasks = [
                {"task_id": task.task_id, "mean": task.mean, "rewards": task.rewards, "learning": task.learning}
                for task in self.steps[0].summary.tasks
            ]
            return {"run_id": self.about.run_id, **_step_fields(self.steps[0], self.prices), "tasks": tasks}
        return self.about.model_dump() | {"steps": [_step_fields(step, self.prices) for step in self.steps]}

    def print(self, console: Console) -> None:
        """Print the run, or the requested step."""
        for line in self._about():
            print_text(console, line)
        if len(self.steps) == 1:
            self._print_step(console, self.steps[0])
        elif self.steps:
            _print_steps(console, self.steps)
            if (more := self.about.steps - len(self.steps)) > 0:
                print_text(console, f"and {count(more, 'step')} before; --json has all", "dim")
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

    def _print_step(self, console: Console, step: StepData) -> None:
        summary = step.summary
        counts = {outcome or "not settled": summary.outcomes.get(outcome, 0) for outcome in (*Outcome, None)}
        outcomes = " + ".join(f"{number:,} {outcome}" for outcome, number in counts.items() if number)
        facts = {f"step {step.name}": f"{summary.planned:,} planned = {outcomes}; {step.trained:,} trained"}
        if summary.reward is not None:
            margin = f" ± {summary.reward.margin:.3f}" if summary.reward.margin is not None else ""
            kinds = {each: summary.tasks_of(each) for each in Learning}
            tasks = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
            facts["reward"] = f"{summary.reward.value:.3f}{margin}; tasks: {tasks}"
        facts["time"] = f"{seconds(summary.seconds)}; rollouts spent {_spent(summary.spent)}"
        tokens = f"{summary.sampled_tokens:,} sampled, {summary.prompt_tokens:,} prompt"
        facts["tokens"] = f"{tokens}, cache {percent(summary.cache_hit)}"
        if (cost := step.cost(self.prices)) is not None:
            facts["cost"] = str(cost)
        for name, text in facts.items():
            print_text(console, Text.assemble((f"{name:8} ", "dim"), text))
        for finding in step.findings:
            advice = f" ({finding.advice}{self.show if finding.advice.startswith('rollout show ') else ''})"
            text = one_line(f"{finding.text}{advice if finding.advice else ''}")
            mark, style = MARKS[finding.level], "red" if finding.level is Level.BAD else ""
            print_text(console, Text(f"  {mark} {text}", style))
        if step.failures:
            console.print(_failures(step.failures))
        console.print(_lowest(summary.tasks))

    def _print_next(self, console: Console) -> None:
        run = shlex.quote(str(self.run_dir))
        lines = {f"rollout report {run}": "all of it, in your browser"}
        if len(self.steps) == 1:
            summary = self.steps[0].summary
            slowest = max(self.steps[0].records, key=lambda record: duration(record) or 0.0)
            worst = summary.tasks[0].task_id
            lines |= {
                f"{show_command(worst)}{self.show}": "the task with the lowest mean reward",
                f"{show_command(slowest.rollout_id)}{self.show}": "the rollout that took longest",
            }
        elif self.steps:
            last = self.steps[-1].step
            lines |= {f"rollout show --step {last}{self.show}": "one step, here the last"}
        if self.about.state in ("killed", "interrupted"):
            lines |= {f"rollout run --resume {run}": "finish it"}
        width = max(map(len, lines))
        for command, what in lines.items():
            print_text(console, Text.assemble(f"  {command:{width}}  ", (what, "dim")))


def _spent(spent: Seconds) -> str:
    largest = sorted(spent.parts, key=lambda part: -part[3])[:3]
    return ", ".join(f"{share:.0%} in {name}" for _, name, _, share in largest if share >= 0.005) or "none"


def _failures(failures: list[FailureCount]) -> Table:
    table = plain_table("outcome", "reason", "rollouts", "first", "message")
    for each in failures:
        cells = (each.outcome, each.reason, str(each.number), each.first, one_line(each.message)[:120])
        table.add_row(*map(Text, cells))
    return table


def _lowest(tasks: tuple[TaskRewards, ...]) -> Table:
    table = plain_table(
        f"lowest {_TASKS} of {len(tasks)} tasks" if len(tasks) > _TASKS else "task", "mean", "rewards"
    )
    for task in tasks[:_TASKS]:
        mean = "none" if task.mean is None else f"{task.mean:.3f}"
        table.add_row(Text(task.task_id), mean, " ".join(f"{reward:g}" for reward in task.rewards))
    return table


def _print_steps(console: Console, steps: tuple[StepData, ...]) -> None:
    table = plain_table("step", "planned", "completed", "trained", "mean reward", "groups usable", "cache", "time")
    for step in steps:
        summary, report = step.summary, step.report
        number = str(step.step)
        table.add_row(
            number if step.name == number else f"{number} ({step.name})",
            f"{summary.planned:,}",
            f"{summary.completed:,}",
            f"{step.trained:,}",
            "none" if summary.mean_reward is None else f"{summary.mean_reward:.3f}",
            "interrupted"
            if report is None
            else f"{sum(group.usable for group in report.groups)}/{len(report.groups)}",
            percent(summary.cache_hit),
            seconds(summary.seconds),
        )
    console.print(table)
