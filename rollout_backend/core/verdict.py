"""Judge a step: whether there is something to train on, and what reduced it. Pure: a step's result in, words out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import NO_RESULT
from rollout_backend.core.report import GroupResult, StepFailure, StepResult

_NO_MODEL_CALL = "no_model_call"


@dataclass(frozen=True)
class Verdict:
    """`passed`: something can be trained, enough rollouts completed, and every session is closed.

    `sentences`: the most important one first.
    """

    passed: bool
    sentences: tuple[str, ...]


def judge(result: StepResult, min_completed: int = 0) -> Verdict:
    """Return the verdict on a step. It fails if fewer than `min_completed` rollouts completed."""
    completed, planned = result.report.outcomes[Outcome.COMPLETED], result.report.planned
    usable = [group for group in result.groups if group.usable]
    done = f"{completed} of {planned} rollouts completed"
    why = _nothing_to_train(result, usable)
    first = (
        [f"nothing to train on: {why}"] if why else [f"{done}, {len(usable)} of {len(result.groups)} groups usable"]
    )
    if completed < min_completed:
        first.append(f"{done}, and at least {min_completed} must complete")
    others = (*([] if why else _spread(usable)), *_calls(result), *_failures(result))
    passed = why is None and completed >= min_completed and result.report.balanced
    return Verdict(passed, (*first, *others))


def _nothing_to_train(result: StepResult, usable: list[GroupResult]) -> str | None:
    report = result.report
    if not report.trainable:
        if completed := report.outcomes[Outcome.COMPLETED]:
            return f"completed rollouts carry only messages, without tokens ({completed} of {completed})"
        return f"0 of {report.planned} rollouts completed"
    if not usable:
        return f"0 of {len(result.groups)} groups usable ({report.trainable} of {report.planned} rollouts trainable)"
    if any(_has_spread(group) or len(group.rollouts) == 1 for group in usable):
        return None
    return _all_equal(usable) or f"rewards equal within each group ({_count(len(usable), 'task')})"


def _spread(usable: list[GroupResult]) -> Iterator[str]:
    """Groups of one rollout have no spread: an evaluation. Only their being all equal is worth a word."""
    larger = [group for group in usable if len(group.rollouts) > 1]
    flat = sum(not _has_spread(group) for group in larger)
    if flat:
        yield f"groups without spread in their rewards: {flat} of {len(larger)}"
    elif len(usable) > 1 and (equal := _all_equal(usable)):
        yield equal


def _has_spread(group: GroupResult) -> bool:
    return len({rollout.reward for rollout in group.rollouts}) > 1


def _all_equal(usable: list[GroupResult]) -> str | None:
    rewards = {rollout.reward for group in usable for rollout in group.rollouts}
    return f"all rewards equal ({_count(len(usable), 'task')}, all {rewards.pop():g})" if len(rewards) == 1 else None


def _calls(result: StepResult) -> Iterator[str]:
    turns = [turn for rollout in result.rollouts for segment in rollout.segments for turn in segment.turns]
    cut = sum(turn.finish_reason == "length" for turn in turns)
    if cut:
        yield f"replies cut at max_tokens or the end of the context: {cut} of {len(turns)}"
    silent = sum(failure.reason == _NO_MODEL_CALL for failure in result.failures)
    if silent:
        yield f"no model call made by {silent} of {result.report.planned} rollouts"


def _failures(result: StepResult) -> Iterator[str]:
    for what, belongs in _KINDS.items():
        reasons = Counter(failure.reason for failure in result.failures if belongs(failure))
        if reasons:
            [(reason, count)] = reasons.most_common(1)
            yield f"{reasons.total()} of {result.report.planned} rollouts {what}, most often {reason} ({count})"
    if result.report.unclosed_sessions:
        yield f"{_count(len(result.report.unclosed_sessions), 'session')} could not be closed"


def _is_lost(failure: StepFailure) -> bool:
    return failure.outcome is Outcome.INFRA_ERROR or failure.reason == NO_RESULT


_KINDS: dict[str, Callable[[StepFailure], bool]] = {
    "lost to the infrastructure": _is_lost,
    "failed in the agent": lambda each: each.outcome is Outcome.AGENT_ERROR and each.reason != _NO_MODEL_CALL,
    "timed out": lambda each: each.outcome is Outcome.TIMED_OUT and not _is_lost(each),
    "cancelled": lambda each: each.outcome is Outcome.CANCELLED and each.reason != "target_reached",
}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
