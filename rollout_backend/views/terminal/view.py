"""Print a step's report, the rollouts of a task, a single rollout and its record, and comparisons in a terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.align import AlignMethod
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_wrapper.contract import Outcome, Rollout, Segment, readable
from rollout_backend.base.formats import count
from rollout_backend.core.reasons import documented_at
from rollout_backend.run.accounts.findings import length_findings, rate_findings, show_command
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord
from rollout_backend.run.accounts.step_report import GroupReport, StepReport, StepResult
from rollout_backend.run.accounts.summary import duration, mean
from rollout_backend.views.terminal.live_view import one_line
from rollout_backend.views.words import WORDS

if TYPE_CHECKING:
    from rollout_backend.views.comparison import Comparison, Difference, Entry, TaskReward
    from rollout_backend.views.rescoring import Rescoring

_FAILURES_SHOWN = 10
# Number of tasks to list in a comparison.
_TASKS_SHOWN = 10
# Number of rollouts without a new reward to list.
_RESCORED_SHOWN = 20
_MAX_MESSAGE = 160
# Used in a pipe, where the console has no width.
_RULE_WIDTH = 80
_YEAR_10000 = 253_402_300_800


def print_step(console: Console, result: StepResult, run_dir: Path) -> None:
    """Print a step's ledger, rewards, failures and timing."""
    report = result.report
    console.print(f"run {report.run_id}, step {report.step}", highlight=False)
    console.print(_ledger(report))
    console.print("reward by group")
    console.print(_groups(report.groups))
    for failure in result.failures[:_FAILURES_SHOWN]:
        console.print(
            f"[red]{failure.rollout_id}[/]: {failure.outcome}, {failure.reason}: {plain(failure.message)} "
            f"[dim](session {failure.session_id or 'never opened'}, attempts {failure.attempts})[/]"
        )
    if len(result.failures) > _FAILURES_SHOWN:
        console.print(f"... and {len(result.failures) - _FAILURES_SHOWN} more")
    tokens = f"{report.sampled_tokens} sampled, {report.given_tokens} given"
    console.print(f"tokens: {tokens}; {report.sampled_tokens / max(report.seconds, 1e-9):.0f} sampled per second")
    if report.latency is not None:
        console.print(f"from PUT to buffer: p50 {report.latency.p50:.3f} s, p99 {report.latency.p99:.3f} s")
    if report.lag is not None:
        console.print(f"from the agent's end to buffer: p50 {report.lag.p50:.3f} s, p99 {report.lag.p99:.3f} s")
    if report.surplus:
        console.print(f"{report.surplus} trainable rollouts came beyond their group's size and are not trained")
    for finding in (*length_findings(report), *rate_findings(report.invoke_rate, report.stop_rate)):
        console.print(finding.text)
    until = "" if report.until_invoke_s is None else f"{report.until_invoke_s:.1f} s until the first invoke"
    closing = "" if report.closing_s is None else f"{report.closing_s:.1f} s after the last outcome"
    details = ", ".join(filter(None, ("to its deadline" if report.deadline_reached else "", until, closing)))
    console.print(f"the step took {report.seconds:.1f} s" + (f": {details}" if details else ""))
    print_text(console, f"rollouts, reports and logs: {run_dir}")
    if report.unarchived:
        console.print(f"[red]{report.unarchived} results could not be written there[/]; they are in S3")
    verdict = "[green]the ledger reconciles[/]" if report.reconciles else "[red]the ledger does NOT reconcile[/]"
    console.print(f"{verdict}; {report.sessions_open} sessions open")
    print_words(console, "reconciles")
    for session_id, why in report.unclosed_sessions.items():
        console.print(f"[red]session {session_id} could not be closed: {plain(why)}[/]")


def _ledger(report: StepReport) -> Table:
    table = Table()
    table.add_column("planned")
    table.add_column(str(report.planned), justify="right")
    for outcome in Outcome:
        table.add_row(outcome, str(report.outcomes[outcome]))
    table.add_section()
    for apart in ("replacements", "duplicates", "late", "unknown", "refused"):
        table.add_row(apart, str(getattr(report, apart)), style="dim")
    return table


def _groups(groups: tuple[GroupReport, ...]) -> Table:
    table = Table()
    for name in ("task", "rewards", "mean", "usable"):
        table.add_column(name, justify="right" if name == "mean" else "left")
    for group in groups:
        mean = "" if group.mean_reward is None else f"{group.mean_reward:.3f}"
        rewards = " ".join(f"{reward:g}" for reward in group.rewards)
        table.add_row(group.task_id, rewards, mean, "yes" if group.usable else "[red]no[/]")
    rewards_of_all = [reward for group in groups for reward in group.rewards]
    if rewards_of_all:
        table.add_section()
        mean = f"{sum(rewards_of_all) / len(rewards_of_all):.3f}"
        table.add_row("all", f"{len(rewards_of_all)} rollouts", mean, "")
    return table


@dataclass(frozen=True)
class TaskView:
    """The rollouts of a task in one step. `show` is appended to each `rollout show`; it may be empty."""

    run_id: str
    step: int
    name: str
    """The step's number as the trainer counts it."""
    task_id: str
    payload: object
    """None if the run directory does not contain it."""
    records: tuple[RolloutRecord, ...]
    show: str = ""

    @property
    def rewards(self) -> list[float]:
        """Return the rewards, without missing ones."""
        return [record.reward for record in self.records if record.reward is not None]

    def fields(self) -> dict[str, Any]:
        """Return the task as an object for JSON."""
        return {
            "run_id": self.run_id,
            "step": self.step,
            "task_id": self.task_id,
            "payload": self.payload,
            "mean_reward": mean(self.rewards),
            "group_usable": any(record.group_usable for record in self.records),
            "rollouts": [record.model_dump(mode="json") for record in self.records],
        }

    def print(self, console: Console) -> None:
        """Print the task and a line for each rollout."""
        average = mean(self.rewards)
        usable = "usable" if any(record.group_usable for record in self.records) else "not usable"
        facts = [count(len(self.records), "rollout"), f"group {usable}"]
        facts.append("no reward" if average is None else f"mean reward {average:.3f}")
        if len(self.rewards) > 1 and len({*self.rewards}) == 1:
            facts.append("all rewards equal: nothing to learn from")
        about = f"  run {self.run_id}, step {self.name}: {', '.join(facts)}"
        print_wrapped(console, Text(), Text.assemble((self.task_id, "bold"), about))
        if self.payload is not None:
            print_text(console, f"payload {readable(json.dumps(self.payload, ensure_ascii=False))}")
        numbers = ("reward", "turns", "tokens", "seconds")
        table = plain_table("rollout", "outcome", *numbers, "reason", right=numbers)
        for record in self.records:
            table.add_row(*_cells(record))
        console.print(table)
        print_words(console, *(record.reason for record in self.records))
        shown = next((record for record in self.records if record.failed), self.records[0])
        print_text(console, f"one of them: {show_command(shown.rollout_id)}{self.show}")


def _cells(record: RolloutRecord) -> list[Text]:
    result, took = record.result, duration(record)
    why = f"{record.reason}: {record.message}" if record.reason and record.message else record.reason
    return [
        Text(record.rollout_id),
        Text(record.outcome or "not settled", "green" if record.outcome is Outcome.COMPLETED else "red"),
        Text("none" if record.reward is None else f"{record.reward:g}"),
        Text("" if result is None else str(result.turns)),
        Text("" if result is None else f"{result.sampled_tokens:,}"),
        Text("" if took is None else f"{took:.1f}"),
        Text(one_line(why)[:_MAX_MESSAGE]),
    ]


def print_rollout(console: Console, rollout: Rollout, step: str) -> None:
    """Print the outcome, messages and turns of a rollout of the step with this name."""
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    style = "green" if rollout.outcome is Outcome.COMPLETED else "red"
    console.print(
        f"[bold]{rollout.rollout_id}[/]  run {rollout.run_id}, step {step}, task {rollout.task_id}\n"
        f"[{style}]{rollout.outcome}[/], reward {reward}, attempt {rollout.attempt}, "
        f"session {plain(rollout.session_id) or 'unknown'}\n"
        f"{when(rollout.started_at)}, took {max(0.0, rollout.finished_at - rollout.started_at):.1f} s, "
        f"model {plain(rollout.model) or 'unknown'}"
    )
    if rollout.segments:
        summary = ResultSummary.of(rollout)
        cached = "unknown" if summary.cache_hit is None else f"{summary.cache_hit:.0%}"
        calls = count(summary.turns, "model call")
        console.print(f"{calls}, {summary.prompt_tokens:,} prompt tokens, cache {cached}")
    if rollout.extras:
        console.print(f"extras: {plain(json.dumps(rollout.extras, ensure_ascii=False))}")
    if rollout.failure is not None:
        _print_failure(console, rollout.failure.message, rollout.failure.reason)
        if rollout.failure.traceback:
            console.print(plain(rollout.failure.traceback), style="dim", highlight=False)
    turns = 0
    for number, segment in enumerate(rollout.segments):
        _print_segment(console, number, segment, turns)
        turns += len(segment.turns)
    if rollout.segments:
        print_words(console, "segment", "weights")


def print_record(console: Console, record: RolloutRecord, step: str, *, with_outcome: bool) -> None:
    """Print where and when a rollout ran. `with_outcome` adds how it ended, for a rollout without a result."""
    if with_outcome:
        console.print(
            f"[bold]{record.rollout_id}[/]  step {step}, task {record.task_id}\n"
            f"[red]{record.outcome or 'not settled'}[/], no result was stored"
        )
        _print_failure(console, record.message or "no message", record.reason)
    usable = "usable" if record.group_usable else "not usable"
    sessions = ", ".join(map(readable, record.session_ids)) or "none opened"
    lines = [f"attempts {record.attempts}, group {usable}", f"sessions: {sessions}"]
    if record.log is not None:
        lines.append(f"log: {readable(record.log)}")
    times = [f"planned {when(record.planned_at)}"]
    times += [f"{event} {at - record.planned_at:+.1f} s" for event, at in record.times.items() if event != "planned"]
    print_text(console, "\n".join([*lines, ", ".join(times)]))


def _print_segment(console: Console, number: int, segment: Segment, first_turn: int) -> None:
    tokens = f"{len(segment.token_ids)} tokens, {segment.sampled_tokens} sampled"
    rule = Rule(f"segment {number} ({plain(segment.split_reason)}): {tokens}", align="left")
    console.print(rule, width=console.width if console.is_terminal else _RULE_WIDTH)
    print_messages(console, segment.messages)
    for i, turn in enumerate(segment.turns, first_turn):
        known = [x for x in segment.logprobs[turn.start : turn.end] if not math.isnan(x)]
        mean = f"{sum(known) / len(known):.3f}" if known else "unknown"
        versions = ", ".join(dict.fromkeys(span.version for span in turn.weight_versions)) or "unknown"
        console.print(
            f"turn {i}: {turn.end - turn.start} tokens in {turn.seconds:.2f} s, "
            f"finish {readable(turn.finish_reason)}, mean logprob {mean}, weights {readable(versions)}, "
            f"{'unknown' if turn.cached_tokens is None else turn.cached_tokens} prompt tokens cached",
            style="dim",
            markup=False,
        )


def print_messages(console: Console, messages: Sequence[Mapping[str, Any]]) -> None:
    """Print messages in the OpenAI format, each in a box."""
    for message in messages:
        text = message.get("content")
        body = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) if text else ""
        calls = message.get("tool_calls")
        if calls:
            body = f"{body}\n{json.dumps(calls, ensure_ascii=False)}".strip()
        _print_panel(console, body, str(message.get("role")))


def print_words(console: Console, *words: str) -> None:
    """Explain those of the printed words that need it."""
    for word in dict.fromkeys(words):
        if word in WORDS:
            print_wrapped(console, Text(f"{word}: ", "dim"), WORDS[word], "dim")


def _print_failure(console: Console, message: str, reason: str) -> None:
    _print_panel(console, message, reason, "red")
    print_words(console, reason)
    print_text(console, f"see {documented_at(readable(reason))}")


def _print_panel(console: Console, text: str, title: str, style: str = "none") -> None:
    if not console.is_terminal:
        # A pipe has no width for a box.
        console.print(f"--- {readable(title)}\n{readable(text)}", markup=False, highlight=False, soft_wrap=True)
        return
    align: AlignMethod = "left" if style == "none" else "center"
    console.print(Panel(plain(text), title=plain(title), title_align=align, border_style=style))


def print_text(console: Console, text: str | Text, style: str | None = None) -> None:
    """Print text that only the terminal wraps, without markup and without highlighting numbers."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_wrapped(console: Console, mark: Text, text: str | Text, style: str = "") -> None:
    """Print text behind a mark. On a terminal, break it at words, and indent its further lines like the first."""
    if not console.is_terminal:
        # Tools that read a pipe need whole lines.
        print_text(console, Text.assemble(mark, text), style)
        return
    if not mark:
        console.print(Text(text, style) if isinstance(text, str) else text)
        return
    table = Table.grid()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(mark, Text(text, style) if isinstance(text, str) else text)
    console.print(table)


def plain_table(*columns: str, right: Container[str] = ()) -> Table:
    """Return a table without lines, whose first column is not cut. Those in `right` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=name == columns[0])
    return table


def plain(text: str) -> str:
    """Return an agent's text without markup and terminal control sequences."""
    return escape(readable(text))


def when(seconds: float) -> str:
    """Return a time in UTC. It may come from a container's clock, which can be arbitrarily wrong."""
    if not 0 < seconds < _YEAR_10000:
        return "start unknown"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- comparisons ------------------------------------------------------------------------------------------


def print_comparison(console: Console, found: Comparison) -> None:
    """Print the differences between two runs, the rewards last."""
    print_text(console, f"A  {found.first}\nB  {found.second}\n")
    first, second = "A", "B"
    _print_table(console, "settings", first, second, _rows(found.settings))
    _print_table(console, "versions and agent", first, second, _rows(found.versions))
    _print_table(console, "rollouts", first, second, _rows(found.outcomes))
    means = [(each.name, *_numbers(each)) for each in found.measures]
    _print_table(console, "mean over common tasks", first, second, means, "difference, 95%")
    print_task_rewards(console, first, second, found.rewards)
    for number, what in (
        (found.changed_tasks, "have the same id and another payload, and are not compared"),
        (found.only_first, f"have a reward in {first} only"),
        (found.only_second, f"have a reward in {second} only"),
    ):
        if number:
            print_text(console, f"tasks that {what}: {number}")
    print_wrapped(console, Text(), reward_sentence(found.reward))


def print_task_rewards(console: Console, first: str, second: str, rewards: Iterable[TaskReward]) -> None:
    """Print the tasks whose rewards differ most."""
    changed = [task for task in rewards if task.first != task.second]
    rows = [
        (task.task_id, f"{task.first:.3f}", f"{task.second:.3f}", f"{task.second - task.first:+.3f}")
        for task in changed[:_TASKS_SHOWN]
    ]
    _print_table(console, "reward by task", first, second, rows, "difference")
    if len(changed) > _TASKS_SHOWN:
        console.print(f"... and {len(changed) - _TASKS_SHOWN} more tasks whose rewards differ: --json has all")


def reward_sentence(reward: Difference | None, both: str = "both runs") -> str:
    """Describe how much the rewards differ, and whether the difference may be chance."""
    if reward is None:
        return f"no task has a reward in {both}, so rewards are not compared"
    change, margin = reward.change.value, reward.change.margin
    means = f"mean reward {reward.first:.3f} and {reward.second:.3f} over {count(reward.tasks, 'task')} of {both}"
    if margin is None:
        return f"{means}: {change:+.3f}; too few tasks to say whether that is chance"
    if change == margin == 0:
        return f"{means}: equal on each task"
    chance = "is more than chance" if reward.is_clear else "may be chance"
    interval = f"95% interval {change - margin:+.3f} to {change + margin:+.3f}"
    return f"{means}: {change:+.3f} ({interval}), which {chance}"


def _rows(entries: Iterable[Entry]) -> Sequence[tuple[str, ...]]:
    return [(each.name, _text(each.first), _text(each.second)) for each in entries]


def _numbers(found: Difference) -> tuple[str, str, str]:
    margin = "" if found.change.margin is None else f" ± {found.change.margin:.3f}"
    return f"{found.first:.3f}", f"{found.second:.3f}", f"{found.change.value:+.3f}{margin}"


def _print_table(
    console: Console, title: str, first: str, second: str, rows: Sequence[tuple[str, ...]], *more: str
) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (title, first, second, *more):
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print()


def _text(value: Any) -> str:
    text = "-" if value is None else str(value)
    # 12 digits of a digest tell two agents apart.
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text


def print_rescoring(console: Console, found: Rescoring, step_name: Callable[[int], str] = str) -> None:
    """Print the tasks whose rewards differ most, the rollouts that have no new reward, and the difference."""
    print_task_rewards(console, "stored", found.scorer.function, found.tasks)
    lines = [f"{each.rollout_id}, step {step_name(each.step)}: {readable(each.error)}" for each in found.failures]
    without = found.completed - found.scored
    if without > _RESCORED_SHOWN:
        lines[_RESCORED_SHOWN:] = [f"... and {without - _RESCORED_SHOWN} more: --json has all"]
    counts = f"{found.scored} of {found.completed} completed rollouts scored, {found.changed} with another reward"
    lines += [
        f"{counts}, {without} without a new reward" if without else counts,
        reward_sentence(found.reward, "both versions"),
        f"new version: {found.folder}",
    ]
    for line in lines:
        print_text(console, line)
