"""Show a run, or a step of it, in a terminal or as JSON: its numbers, findings, and commands that show more.
`RunSummary` is what `rollout run` prints at its end, in at most twelve lines."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_wrapper.contract import Outcome
from rollout_backend.base.formats import count, percent, seconds
from rollout_backend.core.reasons import documented_at
from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.cost import Cost, Prices
from rollout_backend.run.accounts.findings import Finding, Level, Verdict, findings_of, show_command
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.accounts.summary import (
    Learning,
    StepSummary,
    TaskRewards,
    rewards_by_task,
    summarize,
)
from rollout_backend.views.run_data import (
    RunOverview,
    StepData,
    describe_state,
    last_start,
    name_steps,
    read_config,
    read_steps,
    step_namer,
    summarize_run,
)
from rollout_backend.views.terminal.live_view import one_line, sentence
from rollout_backend.views.terminal.view import plain_table, print_text, print_words, print_wrapped, when

# Number of steps in the table of a run.
STEPS = 20
# Number of tasks in the table of a step; --json lists all.
_TASKS = 5
MARKS = {Level.BAD: "!", Level.WARNING: "!", Level.NOTE: "-"}
_MAX_LINES = 12
_COPIED = ("read", "report", "again")


def _step_fields(step: StepData, prices: Prices | None) -> dict[str, Any]:
    summary, cost = step.summary, step.cost(prices)
    return {
        "step": step.step,
        "name": step.name,
        "validates": step.validates,
        "planned": summary.planned,
        "outcomes": {outcome or "not_settled": number for outcome, number in summary.outcomes.items()},
        "trained": summary.trained,
        "mean_reward": summary.mean_reward,
        "sampled_tokens": summary.sampled_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "cache_hit": summary.cache_hit,
        "seconds": summary.seconds,
        "spent_seconds": asdict(summary.spent),
        "cost": cost and cost.fields(),
        "findings": [finding.fields() for finding in step.overview.findings],
        "failures": [asdict(each) | {"see": documented_at(each.reason)} for each in summary.failures],
    }


@dataclass(frozen=True)
class RunView:
    """A run, or one step of it. `show` is appended to each `rollout show`; it may be empty."""

    run_dir: Path
    about: RunOverview
    steps: tuple[StepData, ...]
    step: int | None
    """The only step to show."""
    show: str
    prices: Prices | None
    """Prices for the cost estimate; None if the settings have none."""

    @classmethod
    def read(cls, run_dir: Path, step: int | None, show: str = "", *, last: int | None = None) -> Self:
        """Read a run directory: one step, its `last` steps, or all steps.

        Raises:
            ConfigError: there is no run or no such step, or a file is damaged or has another version.
        """
        about = summarize_run(run_dir)
        if about.state == "unknown" and not about.steps:
            raise ConfigError(f"{run_dir} holds no run: no step, and no run.json that can be read")
        config, ended = read_config(run_dir), RunArchive(run_dir).steps()
        prices = Prices.of(config) if config is not None else None
        if step is not None and step not in ended:
            archive = RunArchive(run_dir)
            why = f"step {step_namer(archive)(step)} of {run_dir} has no records"
            raise ConfigError(f"{why}: it has those of {name_steps(archive, ended)}")
        wanted = ended[-last:] if last is not None and step is None else ended if step is None else [step]
        steps = tuple(read_steps(run_dir, wanted) if wanted else ())
        return cls(run_dir, about, steps, step, show, prices)

    def fields(self) -> dict[str, Any]:
        """Return the run, or the requested step, as an object for JSON."""
        if self.step is not None:
            tasks = [
                {"task_id": task.task_id, "mean": task.mean, "rewards": task.rewards, "learning": task.learning}
                for task in rewards_by_task(self.steps[0].read_records())
            ]
            return {"run_id": self.about.run_id, **_step_fields(self.steps[0], self.prices), "tasks": tasks}
        return self.about.model_dump() | {"steps": [_step_fields(step, self.prices) for step in self.steps]}

    def print(self, console: Console) -> None:
        """Print the run, or the requested step."""
        for line in self._about():
            print_wrapped(console, Text(), line)
        if len(self.steps) == 1:
            self._print_step(console, self.steps[0])
        elif self.steps:
            _print_steps(console, self.steps)
            if (more := len(RunArchive(self.run_dir).steps()) - len(self.steps)) > 0:
                print_text(console, f"and {count(more, 'step')} before; --json has all", "dim")
        self._print_next(console)

    def _about(self) -> Iterator[Text]:
        about = self.about
        began = f"began {when(about.began)}, " if about.began is not None else ""
        state = describe_state(about.state, about.seen_at or 0.0)
        yield Text.assemble((f"run {about.run_id}", "bold"), f"  {state}")
        yield Text(f"{began}{count(about.steps, 'step')}")
        start = last_start(RunArchive(self.run_dir))
        if start is not None and start.agent:
            yield Text(f"agent {one_line(start.agent.get('path') or start.agent.get('arn') or str(start.agent))}")
        if start is not None and start.error:
            yield Text(one_line(start.error), "red")
        if about.state in ("killed", "silent") or not self.steps:
            planned = "?" if about.planned is None else f"{about.planned:,}"
            yield Text(f"{about.completed:,} of {planned} planned rollouts have completed")

    def _print_step(self, console: Console, step: StepData) -> None:
        summary = step.summary
        counts = {outcome or "not settled": summary.outcomes.get(outcome, 0) for outcome in (*Outcome, None)}
        outcomes = " + ".join(f"{number:,} {outcome}" for outcome, number in counts.items() if number)
        facts = {f"step {step.name}": f"{summary.planned:,} planned = {outcomes}; {summary.trained:,} can be trained"}
        if summary.reward is not None:
            margin = f" ± {summary.reward.margin:.3f}" if summary.reward.margin is not None else ""
            kinds = {each: summary.tasks_of(each) for each in Learning}
            tasks = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
            facts["reward"] = f"{summary.reward.value:.3f}{margin}; tasks: {tasks}"
        largest = sorted(summary.spent.parts, key=lambda part: -part[3])[:3]
        spent = ", ".join(f"{share:.0%} in {name}" for _, name, _, share in largest if share >= 0.005) or "none"
        facts["time"] = f"{seconds(summary.seconds)}; rollouts spent {spent}"
        tokens = f"{summary.sampled_tokens:,} sampled, {summary.prompt_tokens:,} prompt"
        facts["tokens"] = f"{tokens}, cache {percent(summary.cache_hit)}"
        if (cost := step.cost(self.prices)) is not None:
            facts["cost"] = str(cost)
        for name, text in facts.items():
            print_wrapped(console, Text(f"{name:8} ", "dim"), text)
        for finding in step.overview.findings:
            advice = f" ({finding.advice}{self.show if finding.advice.startswith('rollout show ') else ''})"
            text = one_line(f"{finding.text}{advice if finding.advice else ''}")
            style = "red" if finding.level is Level.BAD else ""
            print_wrapped(console, Text(f"  {MARKS[finding.level]} ", style), text, style)
        if summary.failures:
            table = plain_table("outcome", "reason", "rollouts", "first", "message")
            for each in summary.failures:
                cells = (each.outcome, each.reason, str(each.number), each.first, one_line(each.message)[:120])
                table.add_row(*map(Text, cells))
            console.print(table)
            print_words(console, *(each.reason for each in summary.failures))
        console.print(_lowest(rewards_by_task(step.read_records())))

    def _print_next(self, console: Console) -> None:
        run = shlex.quote(str(self.run_dir))
        lines = {f"rollout report {run}": "all of it, in your browser"}
        if len(self.steps) == 1:
            worst = rewards_by_task(self.steps[0].read_records())[0].task_id
            lines |= {
                f"{show_command(worst)}{self.show}": "the task with the lowest mean reward",
                f"{show_command(self.steps[0].summary.slowest)}{self.show}": "the rollout that took longest",
            }
        elif self.steps:
            last = shlex.quote(self.steps[-1].name)
            lines |= {f"rollout show --step {last}{self.show}": "one step, here the last"}
        start = last_start(RunArchive(self.run_dir))
        if self.about.state in ("killed", "silent", "interrupted") and start is not None and start.by == "run":
            lines |= {f"rollout run --resume {run}": "finish it"}
        width = max(map(len, lines))
        # Where both do not fit, a line of its own explains a command, which can then be copied whole.
        apart = console.is_terminal and width + 4 + max(map(len, lines.values())) > console.width
        between = "\n    " if apart else "  "
        for command, what in lines.items():
            print_text(console, Text.assemble(f"  {command:{0 if apart else width}}{between}", (what, "dim")))


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
        summary, (usable, groups) = step.summary, step.overview.groups
        table.add_row(
            step.name,
            f"{summary.planned:,}",
            f"{summary.completed:,}",
            f"{summary.trained:,}",
            "none" if summary.mean_reward is None else f"{summary.mean_reward:.3f}",
            f"{usable}/{groups}" if step.overview.has_report else "interrupted",
            percent(summary.cache_hit),
            seconds(summary.seconds),
        )
    console.print(table)


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run. `show` is appended to each `rollout show`, and `again` is the command that repeats the run;
    both may be empty."""

    result: StepResult
    verdict: Verdict
    exit_code: int
    seconds: Mapping[RunPhase, float]
    report: Path | None = None
    show: str = ""
    again: str = ""
    prices: Prices | None = None
    """Prices for the cost estimate; None if the settings have none."""

    @cached_property
    def cost(self) -> Cost | None:
        """Estimate the cost of the step."""
        return self.prices.cost_of(self.step) if self.prices is not None else None

    @cached_property
    def step(self) -> StepSummary:
        """Return the numbers of the step."""
        return summarize(self.result.records)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the verdict and of the step, once each; the verdict's first one comes first."""
        first, *others = self.verdict.findings
        of_step = findings_of(self.result.report, self.step)
        found = {each.text: each for each in (*others, *of_step)}
        found.pop(first.text, None)
        return first, *sorted(found.values(), key=lambda finding: finding.level)

    def fields(self) -> dict[str, Any]:
        """Return the summary as an object for JSON."""
        report, summary = self.result.report, self.step
        return {
            "run_id": report.run_id,
            "exit_code": self.exit_code,
            "passed": self.verdict.passed,
            "findings": [each.fields() for each in self.findings],
            "planned": report.planned,
            "outcomes": report.outcomes,
            "trainable": report.trainable,
            "mean_reward": summary.mean_reward,
            "sampled_tokens": summary.sampled_tokens,
            "prompt_tokens": summary.prompt_tokens,
            "cache_hit": summary.cache_hit,
            "cost": self.cost and self.cost.fields(),
            "seconds": {phase: round(took, 3) for phase, took in self.seconds.items()},
            "report": str(self.report) if self.report is not None else None,
        }


def print_summary(console: Console, summary: RunSummary) -> None:
    passed = summary.verdict.passed and summary.exit_code == 0
    mark = ("ok" if passed else "failed") if console.options.ascii_only else "✓" if passed else "✗"
    first, *others = summary.findings
    facts = [*_facts(summary)]
    most = _MAX_LINES - 1 - len(facts)
    lines = [(Text(f"{mark} ", "bold green" if passed else "bold red"), Text(first.text, "bold"))]
    lines += [(Text(f"  {MARKS[each.level]} "), Text(sentence(each))) for each in others[:most]]
    if more := len(others[most:]):
        lines[-1][1].append(f"; {more} more in the report")
    for sign, line in lines:
        print_wrapped(console, sign, line)
    for name, text in facts:
        label = Text.assemble("  ", (f"{name:9}", "dim"))
        # Only the terminal may wrap a command or a path, so that it can be copied.
        if name in _COPIED:
            print_text(console, Text.assemble(label, text))
        else:
            print_wrapped(console, label, text)


def _facts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    report, step = summary.result.report, summary.step
    outcomes = " + ".join(f"{number:,} {outcome}" for outcome, number in report.outcomes.items() if number)
    reconciles = "it reconciles (each rollout ended once)" if report.reconciles else "it does NOT reconcile"
    open_sessions = count(report.sessions_open + len(report.unclosed_sessions), "session")
    yield "ledger", f"{report.planned:,} = {outcomes or 0}; {reconciles}; {open_sessions} open"
    if step.reward is not None:
        larger = [group for group in report.groups if len(group.rewards) > 1]
        spread = f"; rewards differ in {sum(group.has_spread for group in larger):,} of {len(larger):,} groups"
        yield "reward", f"{step.reward.value:.3f}" + (spread if larger else "")
    # As in the report, rollouts take from the first plan to the last event.
    phases = {**summary.seconds, **({RunPhase.ROLLOUTS: step.seconds} if step.planned else {})}
    yield "time", ", ".join(f"{phase} {seconds(took)}" for phase, took in phases.items())
    sampled = f"{step.sampled_tokens:,} sampled ({step.sampled_tokens / max(report.seconds, 1e-9):,.0f}/s)"
    yield "tokens", f"{sampled}, {step.prompt_tokens:,} prompt, cache {percent(step.cache_hit)}"
    if summary.cost is not None:
        yield "cost", str(summary.cost)
    if summary.step.slowest:
        yield "read", f"{show_command(summary.step.slowest)}{summary.show}   (the longest)"
    if summary.report is not None:
        yield "report", str(summary.report)
    if summary.again:
        yield "again", summary.again
