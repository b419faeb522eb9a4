"""Summarize the end of a run in at most twelve lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rollout_backend.core.formats import count, percent, seconds
from rollout_backend.results.cost import Cost, Prices
from rollout_backend.results.findings import Finding, Level, Verdict, findings_of, show_command
from rollout_backend.results.step_report import StepResult
from rollout_backend.results.summary import StepSummary, duration, summarize
from rollout_backend.results.terminal.live_view import sentence
from rollout_backend.results.terminal.view import print_text
from rollout_backend.serving.model_serving import RunPhase

MARKS = {Level.BAD: "!", Level.WARNING: "!", Level.NOTE: "-"}
_MAX_LINES = 12


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
    prices: Prices | None = None  # None: the settings name none

    @cached_property
    def cost(self) -> Cost | None:
        """Estimate the cost of the step."""
        return self.prices.cost_of(self.result.records) if self.prices is not None else None

    @cached_property
    def step(self) -> StepSummary:
        """Return the numbers of the step."""
        return summarize(self.result.records)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the verdict and of the step, once each; the verdict's first one comes first."""
        first, *others = self.verdict.findings
        of_step = findings_of(self.result.report, self.result.records, self.step)
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
    lines = [Text.assemble((f"{mark} ", "bold green" if passed else "bold red"), (first.text, "bold"))]
    lines += [Text(f"  {MARKS[each.level]} {sentence(each)}") for each in others[:most]]
    if more := len(others[most:]):
        lines[-1].append(f"; {more} more in the report")
    lines += [Text.assemble("  ", (f"{name:9}", "dim"), text) for name, text in facts]
    for line in lines:
        print_text(console, line)


def _facts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    report, step = summary.result.report, summary.step
    outcomes = " + ".join(f"{number:,} {outcome}" for outcome, number in report.outcomes.items() if number)
    reconciles = "it reconciles" if report.reconciles else "it does NOT reconcile"
    open_sessions = count(report.sessions_open + len(report.unclosed_sessions), "session")
    yield "ledger", f"{report.planned:,} = {outcomes or 0}; {reconciles}; {open_sessions} open"
    if step.reward is not None:
        larger = [group for group in report.groups if len(group.rewards) > 1]
        spread = f", {sum(group.has_spread for group in larger):,} of {len(larger):,} groups have a spread"
        yield "reward", f"{step.reward.value:.3f}" + (spread if larger else "")
    yield "time", ", ".join(f"{phase} {seconds(took)}" for phase, took in summary.seconds.items())
    sampled = f"{step.sampled_tokens:,} sampled ({step.sampled_tokens / max(report.seconds, 1e-9):,.0f}/s)"
    yield "tokens", f"{sampled}, {step.prompt_tokens:,} prompt, cache {percent(step.cache_hit)}"
    if summary.cost is not None:
        yield "cost", str(summary.cost)
    longest = max(summary.result.records, key=lambda record: duration(record) or 0.0, default=None)
    if longest is not None:
        yield "read", f"{show_command(longest.rollout_id)}{summary.show}   (the longest)"
    if summary.report is not None:
        yield "report", str(summary.report)
    if summary.again:
        yield "again", summary.again
