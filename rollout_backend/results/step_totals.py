"""The totals of a running step, for a display. Pure.

Invariant: `update` reads each result and each settled rollout once, so its cost does not grow with the step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import Ledger, LedgerEntry
from rollout_backend.results.cost import NO_USAGE, Usage
from rollout_backend.results.findings import FailureCount
from rollout_backend.results.records import ResultSummary
from rollout_backend.results.summary import duration

_LAST = 2


@dataclass(frozen=True)
class LastResult:
    """A result that has just arrived. `text` is the model's last reply, which an agent or a model chose."""

    rollout_id: str
    reward: float | None
    seconds: float | None  # since its agent was invoked; None if an earlier manager did that
    sampled_tokens: int
    text: str


class StepTotals:
    def __init__(self, ledger: Ledger, results: Sequence[Rollout]) -> None:
        """`results` are those that have settled rollouts of the ledger; more are appended while the step runs."""
        self.failures: dict[tuple[Outcome, str], FailureCount] = {}
        self.rewards = 0
        self.reward_sum = 0.0
        self.trainable = self.wasted = NO_USAGE  # of the ended rollouts
        self.turns = 0
        self.cut_replies = 0
        self.sampled_tokens = self.trained_tokens = 0
        self.spread: dict[str, bool] = {}  # by task: whether the rewards of its group differ. Settled, usable groups
        self.seconds: list[float] = []  # of the rollouts that delivered a result, in ascending order
        self._ledger = ledger
        self._results = results
        self._seen_results = 0
        self._seen_settled = 0
        self._rewards: dict[str, list[float]] = {}  # by task

    def update(self) -> None:
        """Add what has arrived and what was settled since the last call."""
        for rollout in self._results[self._seen_results :]:
            self._add_result(rollout)
        self._seen_results = len(self._results)
        for entry in self._ledger.settled[self._seen_settled :]:
            self._add_settled(entry)
        self._seen_settled = len(self._ledger.settled)

    def _add_result(self, rollout: Rollout) -> None:
        summary = ResultSummary.of(rollout)
        self.turns += summary.turns
        self.cut_replies += summary.cut_replies
        self.sampled_tokens += summary.sampled_tokens
        self.trained_tokens += summary.trained_tokens or 0
        self._add_usage(self._ledger.entries[rollout.rollout_id], summary)
        if rollout.reward is not None:
            self.rewards += 1
            self.reward_sum += rollout.reward
            if rollout.trainable:
                self._rewards.setdefault(rollout.task_id, []).append(rollout.reward)

    def _add_usage(self, entry: LedgerEntry, result: ResultSummary | None = None) -> None:
        session_s = duration(entry) or 0.0
        model_s = min(session_s, result.model_s) if result is not None else 0.0
        usage = Usage(session_s, model_s, int(result is not None))
        if entry.trainable:
            self.trainable += usage
        else:
            self.wasted += usage
        if entry.invoked_at is not None and entry.first_invoked_at is not None:
            self.wasted += Usage(max(0.0, entry.invoked_at - entry.first_invoked_at))  # of earlier attempts

    def _add_settled(self, entry: LedgerEntry) -> None:
        if not entry.by_result:
            self._add_usage(entry)
        seconds = duration(entry)
        if entry.delivered and seconds is not None:
            insort(self.seconds, seconds)
        if entry.outcome is not None and entry.outcome is not Outcome.COMPLETED:
            key = entry.outcome, entry.reason
            before = self.failures.get(key)
            number = before.number + 1 if before is not None else 1
            first, message = (before.first, before.message) if before else (entry.planned.rollout_id, entry.message)
            self.failures[key] = FailureCount(*key, number, first, message)
        task_id = entry.planned.task_id
        group, rewards = self._ledger.groups[task_id], self._rewards.get(task_id, ())
        if group.usable and not group.open and len(rewards) > 1:
            self.spread[task_id] = len(set(rewards)) > 1

    @property
    def p95_s(self) -> float | None:
        """Return the seconds within which 95 % of the finished rollouts ended; None for fewer than 20."""
        return self.seconds[int(len(self.seconds) * 0.95)] if len(self.seconds) >= 20 else None

    def last(self) -> list[LastResult]:
        """Return the newest results, newest first."""
        return [self._describe(rollout) for rollout in reversed(self._results[-_LAST:])]

    def _describe(self, rollout: Rollout) -> LastResult:
        entry = self._ledger.entries[rollout.rollout_id]
        return LastResult(
            rollout.rollout_id, rollout.reward, duration(entry), rollout.sampled_tokens, _last_reply(rollout)
        )


def _last_reply(rollout: Rollout) -> str:
    if rollout.failure is not None:
        return rollout.failure.message
    for message in reversed(rollout.segments[-1].messages if rollout.segments else ()):
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            return content
    return ""
