"""Judge a step: whether there is something to train on, and what reduced it. Pure: accounts in, words out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from agent_wrapper.contract import Outcome
from rollout_backend.core.formats import count
from rollout_backend.core.ledger import NO_RESULT
from rollout_backend.results.records import ResultSummary, RolloutRecord
from rollout_backend.results.step_report import GroupReport, StepReport

_NO_MODEL_CALL = "no_model_call"


class Level(IntEnum):
    """How much a finding matters; the most important one is first in order."""

    BAD = 0  # nothing can be trained, or rollouts were lost
    WARNING = 1  # training is possible, and something reduces it
    NOTE = 2


@dataclass(frozen=True)
class Finding:
    """One thing to know about a step, and what to do: a setting to change, or a command that shows more."""

    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True)
class FailureCount:
    """How many rollouts ended in one way."""

    outcome: Outcome
    reason: str
    number: int
    first: str  # a rollout, for the reader to look at
    message: str = ""  # of that rollout


@dataclass(frozen=True)
class Verdict:
    """`passed`: something can be trained, enough rollouts completed, and every session is closed.

    `findings`: the most important one first.
    """

    passed: bool
    findings: tuple[Finding, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        return tuple(finding.text for finding in self.findings)


def judge(report: StepReport, records: Sequence[RolloutRecord], min_completed: int = 0) -> Verdict:
    """Return the verdict on a step. It fails if fewer than `min_completed` rollouts completed."""
    completed, planned = report.outcomes[Outcome.COMPLETED], report.planned
    usable = [group for group in report.groups if group.usable]
    done = f"{completed} of {planned} rollouts completed"
    results = [record.result for record in records if record.result is not None]
    why = _nothing_to_train(report, usable) or _no_token_to_train(results)
    if why and usable and all(reward == 1 for group in usable for reward in group.rewards):
        text = f"nothing to train on: solved, every reward is 1 ({count(len(usable), 'task')})"
        first = Finding(Level.WARNING, text, "choose harder tasks")
    elif why:
        first = Finding(Level.BAD, f"nothing to train on: {why}", _show(records))
    else:
        first = Finding(Level.NOTE, f"{done}, {len(usable)} of {len(report.groups)} groups usable")
    findings = [first]
    if completed < min_completed:
        findings.append(Finding(Level.BAD, f"{done}, and at least {min_completed} must complete"))
    findings += [] if why else _spread(usable)
    findings += cut_replies(sum(result.cut_replies for result in results), sum(result.turns for result in results))
    findings += failure_findings(count_failures(records), report.planned)
    if report.unclosed_sessions:
        text = f"{count(len(report.unclosed_sessions), 'session')} could not be closed"
        findings.append(Finding(Level.BAD, text))
    passed = why is None and completed >= min_completed and report.balanced
    return Verdict(passed, tuple(findings))


def _nothing_to_train(report: StepReport, usable: list[GroupReport]) -> str | None:
    if not report.trainable:
        return f"0 of {report.planned} rollouts completed"
    if not usable:
        return f"0 of {len(report.groups)} groups usable ({report.trainable} of {report.planned} rollouts trainable)"
    if any(group.has_spread or len(group.rewards) == 1 for group in usable):
        return None
    return _all_equal(usable) or f"rewards equal within each group ({count(len(usable), 'task')})"


def _no_token_to_train(results: Sequence[ResultSummary]) -> str | None:
    sampled = sum(result.sampled_tokens for result in results)
    if not sampled or any(result.trained_tokens != 0 for result in results if result.sampled_tokens):
        return None
    return (
        f"none of {sampled:,} sampled tokens has a logprob: every reply had a forced format (tool_choice, "
        "response_format), whose tokens were drawn from another distribution than the model's; if a framework forces "
        "a tool in every call, set gateway.forced_tools: as_auto"
    )


def _spread(usable: list[GroupReport]) -> Iterator[Finding]:
    """Groups of one rollout have no spread: an evaluation. Only their being all equal is worth a word."""
    larger = [group for group in usable if len(group.rewards) > 1]
    flat = sum(not group.has_spread for group in larger)
    if flat:
        text = f"groups without spread in their rewards: {flat} of {len(larger)}"
        yield Finding(Level.WARNING, text, "group.size: raise it, or choose tasks of medium difficulty")
    elif len(usable) > 1 and (equal := _all_equal(usable)):
        yield Finding(Level.WARNING, equal)


def _all_equal(usable: list[GroupReport]) -> str | None:
    rewards = {reward for group in usable for reward in group.rewards}
    return f"all rewards equal ({count(len(usable), 'task')}, all {rewards.pop():g})" if len(rewards) == 1 else None


def cut_replies(cut: int, turns: int) -> Iterator[Finding]:
    if cut:
        text = f"replies cut at max_tokens or the end of the context: {cut} of {turns}"
        yield Finding(Level.WARNING, text, "sampling.max_tokens: raise it")


def failure_findings(failures: Sequence[FailureCount], planned: int) -> Iterator[Finding]:
    """Describe the failures of a step that plans this many rollouts, by kind."""
    silent = [failure for failure in failures if failure.reason == _NO_MODEL_CALL]
    if silent:
        text = f"no model call made by {sum(failure.number for failure in silent)} of {planned} rollouts"
        yield Finding(Level.BAD, text, show_command(silent[0].first))
    for what, (level, belongs) in _KINDS.items():
        kind = [failure for failure in failures if belongs(failure)]
        if kind:
            most = max(kind, key=lambda failure: failure.number)
            total = sum(failure.number for failure in kind)
            text = f"{total} of {planned} rollouts {what}, most often {most.reason} ({most.number})"
            yield Finding(level, text, show_command(most.first))


def count_failures(records: Sequence[RolloutRecord]) -> list[FailureCount]:
    """Return how often each reason ended a rollout of these, in the order of the first ones."""
    found: dict[tuple[Outcome, str], list[RolloutRecord]] = defaultdict(list)
    for record in records:
        if record.outcome is not None and record.failed:
            found[record.outcome, record.reason].append(record)
    return [FailureCount(*key, len(each), each[0].rollout_id, each[0].message) for key, each in found.items()]


def _is_lost(failure: FailureCount) -> bool:
    return failure.outcome is Outcome.INFRA_ERROR or failure.reason == NO_RESULT


_KINDS: dict[str, tuple[Level, Callable[[FailureCount], bool]]] = {
    "lost to the infrastructure": (Level.BAD, _is_lost),
    "failed in the agent": (
        Level.BAD,
        lambda each: each.outcome is Outcome.AGENT_ERROR and each.reason != _NO_MODEL_CALL,
    ),
    "timed out": (Level.WARNING, lambda each: each.outcome is Outcome.TIMED_OUT and not _is_lost(each)),
    "cancelled": (
        Level.NOTE,
        lambda each: each.outcome is Outcome.CANCELLED and each.reason != "target_reached",
    ),
}


def _show(records: Sequence[RolloutRecord]) -> str:
    """Return the command that shows a rollout that failed, or else the first one."""
    shown = next((record for record in records if record.failed), records[0] if records else None)
    return show_command(shown.rollout_id) if shown is not None else ""


def show_command(rollout_id: str) -> str:
    """Return the command that shows a rollout of the newest run."""
    return f"rollout show {rollout_id}"
